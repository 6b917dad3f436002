#!/bin/bash
# run.sh FLAVOUR...: boots kernels of Debian in virtual machines, with Debian's systemd as process 1, and runs
# tests there (the file "tests"). Their events, in the format of "go test -json", are in .cache/kernels/events.json; the
# consoles are in .cache/kernels/FLAVOUR/console.log. It needs root, for the overlay of all files, and the packages of
# "e2e/deps.sh kernels".
#
# The root folder of a machine is that of this one: the lower layer, read-only, of an overlay whose upper layer is in
# memory. So no image is made, and the programs and modules of the tests have their own paths there.
set -euo pipefail
export CGO_ENABLED=0
cd "$(dirname "$0")/../.."
limit=${LIMIT:-25m}
all=$PWD/.cache/kernels
binaries=$all/bin
mkdir -p "$binaries"
rm -f "$all/events.json"

# kernel FLAVOUR: the package linux-image-FLAVOUR, unpacked but not installed. "rm -r .cache/kernels" makes the next run
# download the newest one.
kernel() {
	local linux=$all/$1/linux version
	mkdir -p "$all/$1"
	if ! ls "$linux"/boot/vmlinuz-* >/dev/null 2>&1; then
		# Apt runs downloads as a user of its own, who may not write to the cache.
		(cd "$(mktemp -d)" && chmod 777 . && apt-get update -q && image=$(apt-cache depends "linux-image-$1" |
			awk '/Depends: linux-image/ { print $2; exit }') && apt-get download -q "$image" &&
			dpkg-deb -x "$image"_*.deb "$linux" && rm -r "$PWD")
	fi
	version=$(basename "$linux"/boot/vmlinuz-*)
	version=${version#vmlinuz-}
	[ -e "$linux/lib/modules/$version/modules.dep" ] || depmod -b "$linux" "$version"
}

# initrd FLAVOUR VERSION: what the overlay needs: busybox and some modules, listed in the order in which they are loaded.
initrd() {
	local cache=$all/$1 dir
	dir=$(mktemp -d)
	mkdir "$dir"/{bin,modules}
	cp "$(command -v busybox)" "$dir/bin/busybox"
	cp e2e/kernels/init "$dir/init"
	for module in virtio_pci virtio_rng 9pnet_virtio 9p overlay; do
		modprobe --show-depends -d "$cache/linux" -S "$2" "$module"
	done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r file; do
		cp "$file" "$dir/modules/"
		basename "$file" >>"$dir/modules/order"
	done
	cat >"$dir/config" <<-X
		accel=$accel
		flavour=$1
		rows=${ROWS:-}
		version=$2
		repository=$PWD
		cache=$cache
		binaries=$binaries
	X
	(cd "$dir" && find . | cpio --quiet -o -H newc | gzip -1) >"$cache/initrd"
	rm -r "$dir"
}

# boot FLAVOUR prints what the machine says, and writes its results into .cache/kernels/FLAVOUR/results.
boot() {
	local cache=$all/$1 version
	version=$(basename "$cache"/linux/boot/vmlinuz-*)
	version=${version#vmlinuz-}
	mkdir -p "$cache/results"
	rm -f "$cache"/results/*
	initrd "$1" "$version"
	timeout "$limit" qemu-system-x86_64 -machine q35,accel=$accel -cpu max -smp 2 -m 3072 \
		-display none -serial stdio -monitor none -no-reboot -nic none -device virtio-rng-pci \
		-kernel "$cache/linux/boot/vmlinuz-$version" -initrd "$cache/initrd" \
		-append "console=ttyS0 quiet panic=-1 mitigations=off systemd.show_status=0" \
		-virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
		-virtfs "local,path=$cache/results,mount_tag=results,security_model=none" </dev/null 2>"$cache/qemu.log" |
		tee "$cache/console.log" | sed -n -u "s/\r$//; s/^kernels: /$1: /p"
}

# Emulation takes 10 to 30 times as long as KVM. A /dev/kvm without the processor's flag does not work.
accel=tcg
[ ! -w /dev/kvm ] || ! grep -qE '^flags.* (vmx|svm)( |$)' /proc/cpuinfo || accel=kvm
go build -o "$binaries/steelyard" .
sed -n 's/^\([a-z][^ ]*\) .*/\1/p' e2e/kernels/tests | sort -u | while read -r package; do
	mkdir -p "$(dirname "$binaries/$package")"
	go test -c -tags kernels -o "$binaries/$package.test" "./$package"
done

for flavour in "$@"; do
	kernel "$flavour"
	echo "$(basename "$all/$flavour"/linux/boot/vmlinuz-*), $accel"
done
status=0 machines=()
for flavour in "$@"; do # side by side, because a machine uses hardly more than one processor
	boot "$flavour" &
	machines+=($!)
done
for machine in "${machines[@]}"; do wait "$machine" || status=$?; done

for flavour in "$@"; do
	cache=$all/$flavour n=0
	while read -r package _ _ only part; do
		case $package in '' | '#'*) continue ;; esac
		n=$((n + 1))
		[ "$only" = any ] || [ "$only" = "$flavour" ] || continue
		[ -z "$part" ] || [ "$part" = "${ROWS:-}" ] || continue
		result=$cache/results/$n
		if [ ! -e "$result.status" ]; then
			echo "$flavour: e2e/kernels/tests, entry $n ($package) has no result; the end of the console:"
			tail -n 20 "$cache/console.log" "$cache/qemu.log"
			status=1
		fi
		[ ! -e "$result" ] ||
			go tool test2json -p "kernels/$flavour/$package/$n" <"$result" >>"$all/events.json"
	done <e2e/kernels/tests
done
exit "$status"
