#!/bin/sh
# Installs what the tests need beyond Go: the routers that are our peers, and the compiler of the BPF objects. Nothing is
# installed that is there, and the services that come with the packages are started neither now nor at the next boot.
set -eu
missing= services=
need() { # PROGRAM PACKAGE [SERVICE]
	[ -x "$1" ] || command -v "$1" >/dev/null 2>&1 || { missing="$missing $2" services="$services ${3-}"; }
}
need /usr/sbin/bird bird2 bird
need /usr/lib/frr/bgpd frr frr
need clang-14 clang-14
need llvm-strip-14 llvm-14
need systemd-analyze systemd
need ip iproute2
need setpriv util-linux
need git git
need nft nftables
need containerd containerd containerd
need runc runc
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "missing:$missing; run as root, or: apt-get install$missing" >&2; exit 1; }
command -v apt-get >/dev/null 2>&1 || { echo "missing:$missing; install what your distribution calls them" >&2; exit 1; }

policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
	trap 'rm -f $policy' EXIT
	trap 'exit 1' HUP INT TERM
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod 755 $policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q </dev/null
# shellcheck disable=SC2086
apt-get install -y -q --no-install-recommends $missing </dev/null
if command -v systemctl >/dev/null 2>&1; then
	for s in $services; do systemctl disable "$s" </dev/null; done
fi
