package lb

// Kinds of findings. Meaning and remedy are sentences in docs/findings.md; "steelyard status" also prints the remedy.

// Reachability for clients.
var (
	FoundWaiting = kind("waiting", SeverityDown,
		"The agent waits for this node's network. Programs that an earlier agent left in the kernel still forward.",
		"Give the node the interface, route or address that the finding names; the agent then starts by itself.")
	FoundStarting = kind("starting", SeverityDegraded,
		"The first health checks, or the first sync of the Services, are not complete.", "")
	FoundNothingAnnounced = kind("nothing-announced", SeverityDown,
		"No address that this node should announce is announced.",
		"`steelyard routes` shows the reason for each address.")
	FoundNotAnnounced = kind("not-announced", SeverityDegraded,
		"An address that this node should announce is not announced.",
		"`steelyard routes` shows the reason for each address.")
	FoundAllExcluded = kind("all-nodes-excluded", SeverityDegraded,
		"Every node of the cluster has the label that excludes it from external load balancers, so no node announces "+
			"a Service. Many installers set it on control plane nodes.",
		"Remove the label: `kubectl label node NAME node.kubernetes.io/exclude-from-external-load-balancers-`. Or set "+
			"`ignore_exclude_label = true` in `[kubernetes]`.")
	FoundNoPool = kind("no-pool", SeverityDegraded,
		"Services of type LoadBalancer have waited for an address for a minute, but the configuration has no pool.",
		"Add a `[[pool]]`, or set `allocate = false` in `[kubernetes]` if another controller assigns addresses.")
	FoundNoAgentForClass = kind("no-agent-for-class", SeverityDegraded,
		"Services of a load balancer class that no agent serves have waited for an address for a minute.",
		"Add the class to `load_balancer_class` in `[kubernetes]`, or start the controller of that class.")
	FoundNoAnnouncer = kind("no-announcer", SeverityDegraded,
		"The cluster's Services get addresses, but nothing announces them.",
		"Add `[bgp]` or `[l2]`.")
	FoundNoSession = kind("no-session", SeverityDown,
		"No BGP session is established, so no router sends packets here.",
		"`steelyard peers` shows the reason for each session.")
	FoundServiceProxy = kind("service-proxy", SeverityDegraded,
		"This node needs no kube-proxy, but some of its clients do not reach Services.", "")
	FoundTwoProxies = kind("two-service-proxies", SeverityWarning,
		"The agent serves this node's Services, but another service proxy has rules in the kernel, which may lead to "+
			"endpoints that are gone.",
		"`steelyard proxy status` says what to do next.")
	FoundPortDown = kind("port-down", SeverityDegraded,
		"A port of an announced address has no healthy backend. Its clients are refused or, with `on_all_down = "+
			"\"keep\"`, sent to the backends anyway.",
		"`steelyard backends` shows the reason for each backend.")
	FoundAddressConflict = kind("address-conflict", SeverityDegraded,
		"Another host on the link uses the address, and may receive clients' packets.",
		"Remove the address from the host with the MAC address in the finding.")
	FoundCapacity = kind("capacity", SeverityDegraded,
		"A limit of this node was reached, and packets of new connections were dropped or reset: `flows_full`, "+
			"`snat_exhausted` or `udp_share_full`. Up to ten packets in a minute are only a warning, if that is less "+
			"than one in a hundred new connections. The finding ends a minute after the last such packet.",
		"`steelyard flows` lists the flows by service and backend; see docs/sizing.md for the limits.")
	FoundRepliesLost = kind("replies-lost", SeverityDegraded,
		"This node has lost the route to recent clients, because of a blackhole or a more specific prefix. A single "+
			"client is only a warning.",
		"Compare with `ip route get CLIENT`.")
	FoundServerReplies = kind("server-replies", SeverityDegraded,
		"More than a third of a server's clients do not continue after their first packet, but clients of another "+
			"server do. A filter or limit stops clients but not checks, or the replies are lost.",
		"On that server, compare `ip route get CLIENT` with another server's, and look for filters and limits "+
			"(`nft list ruleset`), then on the path. With `nat`, clients use this node's address and `snat_ports`.")
	FoundUnanswered = kind("unanswered", SeverityDegraded,
		"More than a third of a port's clients do not continue after their first packet, and fewer continue than "+
			"before. No server answers them, or the answers are lost behind this node. A flood of SYNs while traffic "+
			"falls looks the same.",
		"`steelyard explain CLIENT VIP:PORT` names the next hops: look for filters there, on the servers and on this "+
			"node (`nft list ruleset`, `tc filter show`).")
	FoundServerUnreached = kind("server-unreached", SeverityDegraded,
		"Clients' packets do not reach a server that is in use: it has no check, or its checks take another path.",
		"The finding has the cause; `steelyard explain CLIENT VIP:PORT` shows the steps.")
	FoundLocalClients = kind("local-clients", SeverityWarning,
		"Connections that this machine opens to its own VIPs are not balanced, so they fail or pass another balancer.",
		"The finding has the cause; without such connections, set `local_clients = false` in `[datapath]`.")
	FoundFromOtherNodes = kind("from-other-nodes", SeverityDegraded,
		"Packets that other Kubernetes nodes send to pods on this node do not reach them.",
		"Repair the route, node address, tunnel source or key that the finding names.")
)

// Protection of clients against the next fault.
var (
	FoundLessPreferred = kind("less-preferred", SeverityDegraded,
		"An address is announced with a lower preference, because something on this node does not work.",
		"`steelyard routes` shows the reason.")
	FoundSessionDown = kind("session-down", SeverityDegraded,
		"A BGP session is not established, but another one is.",
		"`steelyard peers` shows the reason.")
	FoundBGPListen = kind("bgp-listen", SeverityDegraded,
		"The agent cannot accept BGP connections because another process uses the port, so passive sessions fail.",
		"`ss -ltnp 'sport = :179'` names the process.")
	FoundBFD = kind("bfd", SeverityDegraded,
		"BFD with a peer is not up, so only the hold time detects a failure.",
		"Configure BFD on the router, or disable it on this node; see docs/bgp.md.")
	FoundBackendDown = kind("backend-down", SeverityDegraded,
		"Some backends are not healthy; others serve their clients.",
		"`steelyard backends` shows the reason for each.")
	FoundAllBackendsDown = kind("all-backends-down", SeverityDegraded,
		"All backends on several servers failed at about the same time, so the cause is probably on this node or on "+
			"the path to the servers.",
		"First check `nft list ruleset`, `ip route get SERVER` and the switch. `steelyard backends` shows the reasons.")
	FoundMemberAway = kind("member-away", SeverityDegraded,
		"A member of `[l2]` does not respond: it is down, its port is filtered, or its secret differs.",
		"Open the port for UDP and TCP between members, and compare `secret_file`.")
	FoundMemberName = kind("member-name", SeverityDegraded,
		"Two members of `[l2]` have the same name.", "Set `node.name`.")
	FoundChecksInconclusive = kind("checks-inconclusive", SeverityDegraded,
		"This node cannot run health checks; backends keep their last state. With `[l2]`, this is only a warning for "+
			"a minute after the agent got no CPU time for 0.3 s.",
		"Resolve the shortage that the finding names.")
	FoundKernelBehind = kind("kernel-behind", SeverityDegraded,
		"An update of the services has not reached the kernel for more than five seconds.",
		"The log has the error of each attempt.")
	FoundInterface = kind("interface", SeverityDegraded,
		"A program is not attached to an interface as configured.",
		"The finding has the cause; `bpftool net` lists other programs.")
	FoundAPIServerAway = kind("api-server-away", SeverityDegraded,
		"The Kubernetes API server does not answer. The agent continues with the last known state.",
		"Restore the API server; the agent then recovers by itself.")
	FoundDrained = kind("drained", SeverityDegraded,
		"An operator has drained this node, services or backends.",
		"End it with the names in the finding: `steelyard undrain SERVICE [ADDRESS]`, or `steelyard undrain --node`.")
	FoundReloadRejected = kind("reload-rejected", SeverityDegraded,
		"The configuration file has errors. The previous configuration stays active.",
		"`steelyard check` lists the errors.")
	FoundRestartNeeded = kind("restart-needed", SeverityDegraded,
		"Sections of the file that are read only at the start have changed.",
		"Run `steelyard restart`, which ends no connection.")
	FoundPartFails = kind("part-fails", SeverityDegraded,
		"A part of the agent fails; the agent tries it again.", "The finding has the cause.")
	FoundInputRefused = kind("input-refused", SeverityDegraded,
		"An object or a message caused a panic in the agent or exceeds a limit, and keeps its last state; or an "+
			"endpoint of a Service is ignored. Nothing else is affected.",
		"After a panic, report the stack in the log. Change or delete the object.")
	FoundNodesUnreachable = kind("nodes-unreachable", SeverityDegraded,
		"More than half of the cluster's nodes do not answer through the tunnel. They still get connections, because "+
			"the fault is probably on this node.",
		"Permit UDP 6090 (`datapath.tunnel_port`) and ICMP replies between the nodes: `nft list ruleset`.")
	FoundTunnelKeys = kind("tunnel-keys", SeverityDegraded,
		"The cluster's tunnel keys cannot be read or written.",
		"The agent needs access to the Secret that docs/kubernetes.md names.")
	FoundHashSeed = kind("hash-seed", SeverityDegraded,
		"The cluster's hash seed differs from this node's, so connections end when routers rehash.",
		"Run `steelyard restart`, which ends no connection.")
	FoundSysctlsNotStored = kind("sysctls-not-stored", SeverityDegraded,
		"`steelyard cleanup` cannot restore sysctls, because their values could not be stored.",
		"Make the state directory writable.")
	FoundLogIncomplete = kind("log-incomplete", SeverityDegraded,
		"Log lines were lost in the last ten minutes, because the process that reads them is too slow or has stopped.",
		"Check the process or disk that receives the log.")
)

// Conditions that may become a fault.
var (
	FoundConfiguration = kind("configuration", SeverityWarning,
		"The configuration is valid, but probably not as intended.", "")
	FoundFileChanged = kind("file-changed", SeverityWarning,
		"The configuration file was edited after it was loaded, or can no longer be read. The next start reads it.",
		"`steelyard diff` prints the difference, `steelyard reload` applies the file, and `steelyard config show` "+
			"prints the active one.")
	FoundUnconfirmed = kind("unconfirmed", SeverityWarning,
		"An applied configuration waits until an operator confirms it. If its time or the agent ends before, the "+
			"previous one becomes active again.",
		"`steelyard confirm` keeps the configuration, and `steelyard reload` goes back at once.")
	FoundWeights = kind("weights", SeverityWarning,
		"An operator has set weights that replace those of the configuration.",
		"`steelyard weight SERVICE ADDRESS default` restores the configured weight.")
	FoundHiddenPrograms = kind("hidden-programs", SeverityWarning,
		"Without `CAP_SYS_ADMIN`, the agent cannot verify whether other programs pass packets on.",
		"`bpftool prog show id ID` names a program; `steelyard cleanup` removes programs of an earlier agent.")
	FoundTableSize = kind("table-size", SeverityWarning,
		"The flow tables keep the size of an earlier `max_flows`, because resizing would end all connections.", "")
	FoundPinsWritable = kind("pins-writable", SeverityWarning,
		"Other users may write to the bpffs and could keep the agent from starting.", "")
	FoundPinsLost = kind("pins-lost", SeverityWarning,
		"Lost files of `/sys/fs/bpf/steelyard` cannot be restored; the agent's next start ends all connections.",
		"Mount a bpffs on `/sys/fs/bpf`.")
	FoundUnverified = kind("unverified", SeverityWarning,
		"The kernel does not run synthetic packets, for example for lack of memory, so new faults are not detected.",
		"Resolve the shortage that the finding names.")
	FoundNoPackets = kind("no-packets", SeverityWarning,
		"Clients sent packets to an announced address, but none have arrived for a minute. The clients have stopped, "+
			"or their packets do not reach this node.",
		"If clients fail, look for a route filter or limit on the router: `birdc show route filtered` (BIRD), "+
			"`show bgp neighbors NODE filtered-routes` (FRR), `ip neigh` with `[l2]`.")
	FoundNodeUnreachable = kind("node-unreachable", SeverityWarning,
		"A node of the cluster does not answer through the tunnel, so this node sends its pods no new connections.",
		"If that node is running, permit UDP 6090 (`datapath.tunnel_port`) from this node to it.")
	FoundNoDefaultRoute = kind("no-default-route", SeverityWarning,
		"There was no default route when the agent started, so only clients on this node's links get replies.",
		"Add a default route if there are other clients.")
	FoundTunnelKeyMismatch = kind("tunnel-key-mismatch", SeverityWarning,
		"Packets from a tunnel source lack a valid token: they are forged, or the sender lacks this node's keys.",
		"Add this node to the sender's `tunnel_sources`, and compare the key files (docs/keys.md).")
)

// What only "steelyard doctor" finds, because it asks the network.
var (
	FoundMTU = kind("mtu", SeverityDegraded,
		"Large packets to a server or router are lost, and no ICMP error says so. Connections open, and then hang.",
		"Permit ICMP *fragmentation needed* and ICMPv6 *packet too big* on the path, or lower the MTU of this node's "+
			"interface towards it: `ip link set INTERFACE mtu BYTES`.")
	FoundFiltered = kind("filtered", SeverityDegraded,
		"A filter on this node drops what health checks, BGP or members of `[l2]` send.",
		"`nft list ruleset` shows the rule, unless a BPF program of a cgroup is the filter.")
	FoundAnswersFiltered = kind("answers-filtered", SeverityDegraded,
		"Answers to health checks, BGP or members of `[l2]` arrive at this node's interface, and this node drops them.",
		"`nft list ruleset` shows the rule; else compare `sysctl net.ipv4.conf.all.rp_filter` and "+
			"`ip route get ADDRESS`.")
	FoundClock = kind("clock", SeverityWarning,
		"A member's clock differs by more than five seconds, so times in logs and events of both cannot be compared.",
		"`timedatectl` on both: NTP should be active.")
	FoundNotPermitted = kind("not-permitted", SeverityDegraded,
		"The API server does not grant the agent the permissions it needs, so it misses Services, endpoints, keys or "+
			"Events.",
		"`steelyard manifest --image IMAGE | kubectl apply -f -` as a DaemonSet; otherwise bind its roles: "+
			"`kubectl create clusterrolebinding NODE --clusterrole=steelyard --user=USER` and `kubectl -n steelyard "+
			"create rolebinding NODE --role=steelyard --user=USER`, or those named `steelyard-allocator` to assign "+
			"addresses.")
	FoundNetworkPolicy = kind("network-policy", SeverityWarning,
		"A NetworkPolicy does not admit the clients of a Service. It sees their addresses, under the traffic policy "+
			"Cluster as well, where kube-proxy shows it a node's.",
		"Add an `ipBlock` with the clients' addresses to the policy: `kubectl -n NAMESPACE edit networkpolicy NAME`.")
	FoundRouterLacksRoute = kind("router-lacks-route", SeverityDegraded,
		"A router answers that it has no route to an announced address: it filters or limits what it accepts.",
		"On the router: `birdc show route filtered` (BIRD), `show bgp neighbors NODE filtered-routes` (FRR).")
	FoundServerRoute = kind("server-route", SeverityDegraded,
		"Answers of a server with `dsr` or `tunnel` are lost on the way through its router, as its clients' are.",
		"On that server: `ip route replace default via ROUTER`.")
	FoundOtherSpeaker = kind("other-speaker", SeverityDegraded,
		"Another program on this node has a BGP session with the same router, which keeps only one for each address.",
		"Stop it, or give one of the two another address (`source` of the peer).")
	FoundStrictARP = kind("strict-arp", SeverityDegraded,
		"kube-proxy in IPVS mode makes every node answer ARP for addresses that one node announces.",
		"Set `ipvs.strictARP: true` in kube-proxy's ConfigMap: `kubectl -n kube-system edit configmap kube-proxy`.")
)
