#!/bin/bash
# An uplink to a router, which is BIRD in a network namespace.
set -euo pipefail
sleep 3
ip netns add router
ip link add eth0 type veth peer name lb netns router
ip address add 192.0.2.2/24 dev eth0
ip link set eth0 up
ip -n router address add 192.0.2.1/24 dev lb
ip -n router link set lb up
cat >/run/router.conf <<X
router id 192.0.2.1;
protocol device { }
protocol kernel { ipv4 { import none; export all; }; }
protocol bgp {
	local 192.0.2.1 as 64500;
	neighbor 192.0.2.2 as 64512;
	graceful restart aware;
	connect retry time 1; error wait time 1, 2; error forget time 1;
	ipv4 { import all; export none; };
}
X
ip netns exec router bird -c /run/router.conf -s /run/router.ctl
