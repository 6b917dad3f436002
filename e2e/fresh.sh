#!/bin/bash
# Runs the two commands of README in a minimal Debian: a root folder by debootstrap with make, git and ca-certificates,
# into which Go, this machine's settings of apt and Go, and a clone of the last commit are copied. With the argument
# "deps" it only installs what the tests need there. Mounts are in a namespace of their own, and end with this script.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C PATH="$PATH:/usr/local/go/bin"
if [ -z "${FRESH_ROOT:-}" ]; then
	FRESH_ROOT=$(mktemp -d "${TMPDIR:-/var/tmp}/steelyard-fresh.XXXXXX")
	chmod 755 "$FRESH_ROOT" # as / is: exec checks run as nobody
	export FRESH_ROOT
	trap 'rm -rf --one-file-system "$FRESH_ROOT"' EXIT
	trap 'exit 1' HUP INT TERM
	unshare --mount --propagation slave "$PWD/e2e/fresh.sh" "$@"
	exit
fi
root=$FRESH_ROOT

read -r mirror suite < <(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' |
	grep -vE -- '-(security|updates|backports)' | sort -u)
debootstrap --variant=minbase --include=make,git,ca-certificates "$suite" "$root" "$mirror" >"$root.log" 2>&1 ||
	{ tail -n 20 "$root.log"; rm -f "$root.log"; exit 1; }
rm -f "$root.log"

# What this machine needs to reach the servers of apt and Go.
rm -rf "$root"/etc/apt/sources.list*
for path in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/apt/trusted.gpg.d /etc/apt/keyrings \
	/etc/apt/auth.conf.d /etc/resolv.conf /etc/hosts /usr/local/share/ca-certificates "$(go env GOENV)"; do
	[ ! -e "$path" ] || { mkdir -p "$root${path%/*}" && cp -aL --no-target-directory "$path" "$root$path"; }
done
rm -f "$root"/etc/apt/apt.conf.d/docker-* # they delete packages after their download
chroot "$root" update-ca-certificates >/dev/null 2>&1

mkdir -p "$root/usr/local/go"
cp -a "$(go env GOROOT)/." "$root/usr/local/go/"
git -c safe.directory='*' clone -q "$PWD" "$root/steelyard"
mount --bind "$root" "$root" # pivot_root wants a mount
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys" # with bpffs and the control groups
mount --rbind /dev "$root/dev"

# A variable named here is passed on: how Go and apt reach their servers, and whether a skipped test fails. By
# pivot_root, the folder becomes the root of the mount namespace; who enters that namespace would leave a chroot.
run() {
	env -i HOME=/root TERM="${TERM:-dumb}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
		${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
		${no_proxy:+no_proxy="$no_proxy"} ${GOPROXY:+GOPROXY="$GOPROXY"} \
		${STEELYARD_CI:+STEELYARD_CI="$STEELYARD_CI"} unshare --mount --propagation slave \
		sh -ec "cd '$root'; pivot_root . mnt; umount --lazy /mnt; cd /steelyard; $*"
}
start=$SECONDS
if [ "${1:-}" = deps ]; then
	run make deps
	echo "installation: $((SECONDS - start)) s"
	exit
fi
run make demo
echo "make demo: $((SECONDS - start)) s"
start=$SECONDS
run make test
echo "make test: $((SECONDS - start)) s"
