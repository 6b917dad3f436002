# Runs as the first process of the minimal Debian of packages.sh. This machine is the balancer.
set -euo pipefail
fail() {
	echo "packages: $*" >&2
	[ ! -e /agent.log ] || tail -n 20 /agent.log >&2
	exit 1
}
until_() { # SECONDS COMMAND...
	local left=$(($1 * 10))
	shift
	until "$@"; do
		left=$((left - 1))
		[ $left -gt 0 ] || fail "not in time: $*"
		sleep 0.1
	done
}
architecture=$(dpkg --print-architecture)
name() { ls /"$1"/*"$2"; }           # the package of a release

ip link set lo up
for side in client:192.0.2 server:198.51.100; do
	host=${side%:*} net=${side#*:}
	ip netns add "$host"
	ip link add "$host" type veth peer name eth0 netns "$host"
	ip address add "$net.1/24" dev "$host"
	ip link set "$host" up
	ip -n "$host" address add "$net.2/24" dev eth0
	ip -n "$host" link set lo up
	ip -n "$host" link set eth0 up
	ip -n "$host" route add default via "$net.1"
done
ip netns exec server perl /talk.pl serve 198.51.100.2 9000 &

running() { steelyard status >/status 2>&1; }
start_agent() {
	/usr/bin/steelyard run >>/agent.log 2>&1 &
	agent=$!
	until_ 60 running
}
answered() { ip netns exec client timeout 10 perl /talk.pl ask 203.0.113.10 9000 /etc/hostname >/dev/null 2>&1; }
left() { # files of the package or the agent; /var/lib/dpkg and the logs are the package manager's
	find / -xdev -iname '*steelyard*' -not -path '/old/*' -not -path '/new/*' -not -path '/var/log/*' \
		-not -path '/var/lib/dpkg/*' -not -path '/proc/*'
	ls -A /sys/fs/bpf | grep -v '[.]debug$' || true # the kernel makes maps.debug and progs.debug
}

# cycle FORMAT INSTALL UPGRADE REMOVE: the life of a package, with a client's connection over the upgrade.
cycle() {
	local format=$1 install=$2 upgrade=$3 remove=$4
	echo "== $format"
	$install "$(name old "$5")"
	[ "$(stat -c '%a %U' /etc/steelyard /etc/steelyard/steelyard.toml | tr '\n' ' ')" = "750 root 640 root " ] ||
		fail "modes: $(stat -c '%n %a %U' /etc/steelyard /etc/steelyard/steelyard.toml)"
	grep -q '^ExecStart=/usr/bin/steelyard run$' /usr/lib/systemd/system/steelyard.service || fail "the unit"
	grep -q '^ExecStart=/usr/bin/steelyard proxy watch$' /usr/lib/systemd/system/steelyard-watch.service ||
		fail "the unit of the watcher"
	gzip -dc /usr/share/man/man8/steelyard.8.gz | grep -q '^\.SH explain$' || fail "the manual page"
	steelyard check --elsewhere >/dev/null || fail "the example is refused"
	[ "$(steelyard version | head -n 1)" = 0.1.0 ] || fail "version $(steelyard version)"
	cat >/etc/steelyard/steelyard.toml <<-END
		[node]
		address = "192.0.2.1"
		[datapath]
		interfaces = ["client", "server"]
		[[service]]
		name = "talk"
		address = "203.0.113.10"
		ports = ["9000"]
		backends = ["198.51.100.2"]
		check = { type = "tcp", interval = "200ms" }
	END
	start_agent
	until_ 30 answered
	rm -f /enough
	ip netns exec client perl /talk.pl ask 203.0.113.10 9000 /enough &
	local client=$!
	$upgrade "$(name new "$5")" 2>&1 | tee /upgrade.log
	grep -q '^restarted: version 0.1.1$' /upgrade.log || fail "the upgrade did not restart the agent"
	grep -q 198.51.100.2 /etc/steelyard/steelyard.toml || fail "the upgrade replaced the configuration"
	touch /enough
	wait $client || fail "the connection ended in the upgrade"
	answered || fail "no new connection after the upgrade"
	if $remove >/remove.log 2>&1; then fail "removed beside a running agent"; fi
	grep -q 'agent' /remove.log || fail "the removal was refused without saying why: $(cat /remove.log)"
	kill $agent
	wait $agent || fail "the agent: exit status $?"
	$remove
	[ -z "$(left)" ] || fail "left behind: $(left)"
}

cycle deb "dpkg -i" "dpkg -i --force-confold" "dpkg --purge steelyard" "_$architecture.deb"
echo "packages: installed, upgraded and removed"
