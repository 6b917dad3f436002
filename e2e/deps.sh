#!/bin/sh
# Installs what the tests need beyond Go: routing daemons, the compiler of the BPF objects and some tools. With the
# argument "bpf", only that compiler; with "kubernetes", also a container runtime and the programs of pods; with
# "kernels", a virtual machine; with "bench", the peers of make bench; with "fresh", debootstrap; with "race", a C
# compiler; with "browser", a browser. Programs of Debian's essential packages are not listed.
# It installs only what is missing, and neither starts nor enables the services of these packages.
set -eu
missing= services= enough=
need() { # PROGRAM-OR-FILE PACKAGE [SERVICE]
	[ -n "$enough" ] || [ -e "$1" ] || command -v "$1" >/dev/null 2>&1 || case "$missing " in
	*" $2 "*) ;;
	*) missing="$missing $2" services="$services ${3-}" ;;
	esac
}
# Go downloads modules by HTTPS.
need /etc/ssl/certs/ca-certificates.crt ca-certificates
# The Makefile links the version in.
need git git
# make generate, and the test that the BPF objects are those of the sources.
need clang-14 clang-14
need llvm-strip-14 llvm-14
[ "${1-}" != bpf ] || enough=1
# The routers; the tests of the announcers run birdc and a BIRD of their own.
need /usr/sbin/bird bird2 bird
need /usr/sbin/birdc bird2 bird
need /usr/lib/frr/zebra frr frr
need /usr/lib/frr/bgpd frr frr
need vtysh frr frr
# ip, ss and tc change and list routes, links, sockets and filters in a host.
need ip iproute2
need ss iproute2
need tc iproute2
# tcpdump reads the captures of "steelyard trace".
need tcpdump tcpdump
# setpriv drops capabilities.
need setpriv util-linux
# nft drops packets of a host; kube-proxy writes its rules.
need nft nftables
# curl is a client in the demo's shell, and in the image of pods.
need curl curl
# umount uncovers what was mounted over pins.
need mount mount
if [ "${1-}" = kubernetes ]; then
	# kubelets: unshare makes their PID namespaces.
	need unshare util-linux
	need containerd containerd containerd
	need ctr containerd containerd
	need runc runc
	# Pods: their network, and the programs in their image.
	need /usr/lib/cni/ptp containernetworking-plugins
	need iptables iptables
	need nc.openbsd netcat-openbsd
	need dash dash
	need wget wget
	need ldd libc-bin
fi
# Ubuntu has Chromium only as a snap, which does not run in a namespace.
[ "${1-}" != browser ] || command -v google-chrome >/dev/null 2>&1 || need chromium chromium
if [ "${1-}" = bench ]; then
	need wrk wrk
	need nginx nginx-light nginx
	need /usr/lib/nginx/modules/ngx_stream_module.so libnginx-mod-stream
	need haproxy haproxy haproxy
fi
# make race: the race detector is linked with C.
if [ "${1-}" = race ]; then
	need gcc gcc
	need /usr/include/stdlib.h libc6-dev
fi
# make fresh.
[ "${1-}" != fresh ] || need debootstrap debootstrap
# The test of the unit file.
need systemd-analyze systemd
# The virtual machine of "make test-kernels", and programs of its tests.
if [ "${1-}" = kernels ]; then
	need qemu-system-x86_64 qemu-system-x86
	need /usr/share/doc/busybox-static busybox-static
	need cpio cpio
	need depmod kmod
	need /usr/sbin/ipvsadm ipvsadm ipvsadm
	need /lib/systemd/systemd systemd
	need dbus-daemon dbus
fi
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
# shellcheck disable=SC2086 # one word a package
apt-get install -y -q --no-install-recommends $missing </dev/null
if command -v systemctl >/dev/null 2>&1; then
	for s in $services; do systemctl disable "$s" </dev/null; done
fi
