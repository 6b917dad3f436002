#!/bin/bash
# Boots Debian's kernel in a virtual machine, with Debian's systemd as process 1, and runs tests there (the file "tests").
# Their events, in the format of "go test -json", are in .cache/kernels/FLAVOUR/events.json; the console is in
# console.log beside it. It needs root, for the overlay of all files, and the packages of "e2e/deps.sh kernels".
#
# The root folder of the machine is that of this one: the lower layer, read-only, of an overlay whose upper layer is in
# memory. So no image is made, and the programs and modules of the tests have their own paths there.
set -euo pipefail
export CGO_ENABLED=0
cd "$(dirname "$0")/../.."
flavour=${1:-amd64} # of the package linux-image-FLAVOUR
limit=${LIMIT:-25m}
cache=$PWD/.cache/kernels/$flavour
binaries=$PWD/.cache/kernels/bin
mkdir -p "$cache/results" "$binaries"
rm -f "$cache"/results/* "$cache/events.json"

# The kernel, unpacked but not installed. "rm -r .cache/kernels" makes the next run download the newest one.
if ! ls "$cache"/linux/boot/vmlinuz-* >/dev/null 2>&1; then
	# Apt runs downloads as a user of its own, who may not write to the cache.
	(cd "$(mktemp -d)" && chmod 777 . && apt-get update -q && image=$(apt-cache depends "linux-image-$flavour" |
		awk '/Depends: linux-image/ { print $2; exit }') && apt-get download -q "$image" &&
		dpkg-deb -x "$image"_*.deb "$cache/linux" && rm -r "$PWD")
fi
version=$(basename "$cache"/linux/boot/vmlinuz-*)
version=${version#vmlinuz-}
[ -e "$cache/linux/lib/modules/$version/modules.dep" ] || depmod -b "$cache/linux" "$version"

# Emulation takes 10 to 30 times as long as KVM. A /dev/kvm without the processor's flag does not work.
accel=tcg
[ ! -w /dev/kvm ] || ! grep -qE '^flags.* (vmx|svm)( |$)' /proc/cpuinfo || accel=kvm
echo "Linux $version, $accel"
go build -trimpath -o "$binaries/steelyard" .
sed -n 's/^\([a-z][^ ]*\) .*/\1/p' e2e/kernels/tests | sort -u | while read -r package; do
	mkdir -p "$(dirname "$binaries/$package")"
	go test -c -tags kernels -o "$binaries/$package.test" "./$package"
done

# The initrd has what the overlay needs: busybox and some modules, listed in the order in which they are loaded.
initrd=$(mktemp -d)
trap 'rm -rf "$initrd"' EXIT
mkdir "$initrd"/{bin,modules}
cp "$(command -v busybox)" "$initrd/bin/busybox"
cp e2e/kernels/init "$initrd/init"
for module in virtio_pci virtio_rng 9pnet_virtio 9p overlay; do
	modprobe --show-depends -d "$cache/linux" -S "$version" "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r file; do
	cp "$file" "$initrd/modules/"
	basename "$file" >>"$initrd/modules/order"
done
cat >"$initrd/config" <<X
accel=$accel
version=$version
repository=$PWD
cache=$cache
binaries=$binaries
X
(cd "$initrd" && find . | cpio --quiet -o -H newc | gzip -1) >"$cache/initrd"

status=0
timeout "$limit" qemu-system-x86_64 -machine q35,accel=$accel -cpu max -smp 2 -m 3072 \
	-display none -serial stdio -monitor none -no-reboot -nic none -device virtio-rng-pci \
	-kernel "$cache/linux/boot/vmlinuz-$version" -initrd "$cache/initrd" \
	-append "console=ttyS0 quiet panic=-1 mitigations=off systemd.show_status=0" \
	-virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
	-virtfs "local,path=$cache/results,mount_tag=results,security_model=none" </dev/null 2>"$cache/qemu.log" |
	tee "$cache/console.log" | sed -n -u 's/\r$//; s/^kernels: //p' || status=$?

n=0
while read -r package _; do
	case $package in '' | '#'*) continue ;; esac
	n=$((n + 1))
	result=$cache/results/$n
	if [ ! -e "$result.status" ]; then
		echo "e2e/kernels/tests, entry $n ($package) has no result; the end of the console:"
		tail -n 20 "$cache/console.log" "$cache/qemu.log"
		status=1
	fi
	[ ! -e "$result" ] || go tool test2json -p "kernels/$flavour/$package/$n" <"$result" >>"$cache/events.json"
done <e2e/kernels/tests
exit "$status"
