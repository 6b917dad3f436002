#!/bin/bash
# Installs, upgrades and removes the deb of two versions in a minimal Debian, while a client talks to a server through
# the agent. Root. Arguments: the folders of the two releases. Like fresh.sh, with networks in namespaces of their own.
set -euo pipefail
export LC_ALL=C
if [ -z "${PACKAGES_ROOT:-}" ]; then
	PACKAGES_ROOT=$(mktemp -d "${TMPDIR:-/var/tmp}/steelyard-packages.XXXXXX")
	export PACKAGES_ROOT
	trap 'rm -rf --one-file-system "$PACKAGES_ROOT" "$PACKAGES_ROOT.log"' EXIT
	trap 'exit 1' HUP INT TERM
	read -r mirror suite < <(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' |
		grep -vE -- '-(security|updates|backports)' | sort -u)
	debootstrap --variant=minbase --include=iproute2 "$suite" "$PACKAGES_ROOT" "$mirror" >"$PACKAGES_ROOT.log" 2>&1 ||
		{ tail -n 20 "$PACKAGES_ROOT.log"; exit 1; }
	unshare --mount --net --pid --fork --kill-child --propagation slave "$(realpath "$0")" "$@"
	exit
fi
root=$PACKAGES_ROOT here=$(dirname "$0")
mkdir "$root/old" "$root/new"
cp "$1"/*.deb "$root/old/"
cp "$2"/*.deb "$root/new/"
cp "$here/packages-inside.sh" "$here/talk.pl" "$root/"
mount --bind "$root" "$root" # pivot_root wants a mount
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys" # that of this network
mount -t bpf bpf "$root/sys/fs/bpf"
mount --rbind /dev "$root/dev"
cd "$root"
pivot_root . mnt
umount --lazy /mnt
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin bash /packages-inside.sh
