#!/bin/sh
# Installs what the tests need beyond Go: the routers that are our peers, and the compiler of the BPF objects. Nothing is
# installed that is there, and the services that come with the packages are not started.
set -eu
missing=
need() { # PROGRAM PACKAGE
	[ -x "$1" ] || command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need bird bird2
need /usr/lib/frr/bgpd frr
need clang-14 clang-14
need llvm-strip-14 llvm-14
need systemd-analyze systemd
need ip iproute2
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "missing:$missing; run as root, or: apt-get install$missing" >&2; exit 1; }

policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod 755 $policy
	trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086
apt-get install -y -q --no-install-recommends $missing
