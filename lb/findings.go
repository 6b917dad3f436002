package lb

// Kinds of findings. Meaning and remedy are sentences in docs/findings.md; "steelyard status" also prints the remedy.

// Reachability for clients.
var (
	FoundWaiting = kind("waiting", SeverityDown,
		"The agent waits for the network of this node. What an earlier agent left in the kernel still forwards.",
		"Give the node the interface, route or address that the text names; the agent then starts by itself.")
	FoundStarting = kind("starting", SeverityDegraded,
		"The first health checks, or the first sync of the Services, are not complete.", "")
	FoundNothingAnnounced = kind("nothing-announced", SeverityDown,
		"No address that this node should announce is announced.",
		"`steelyard routes` has the reason for each address.")
	FoundNotAnnounced = kind("not-announced", SeverityDegraded,
		"An address that this node should announce is not announced.",
		"`steelyard routes` has the reason for each address.")
	FoundAllExcluded = kind("all-nodes-excluded", SeverityDegraded,
		"Every node of the cluster has the label that excludes it from external load balancers, so no node announces "+
			"a Service. Installers set it on control plane nodes.",
		"Remove the label: `kubectl label node NAME node.kubernetes.io/exclude-from-external-load-balancers-`. Or set "+
			"`ignore_exclude_label = true` in `[kubernetes]`.")
	FoundNoPool = kind("no-pool", SeverityDegraded,
		"Services of type LoadBalancer have waited for a minute, and the configuration has no pool of addresses.",
		"Add a `[[pool]]`, or set `allocate = false` in `[kubernetes]` if another controller assigns addresses.")
	FoundNoAgentForClass = kind("no-agent-for-class", SeverityDegraded,
		"Services of a load balancer class that no agent serves have waited for an address for a minute.",
		"Add the class to `load_balancer_class` in `[kubernetes]`, or start the controller of that class.")
	FoundNoAnnouncer = kind("no-announcer", SeverityDegraded,
		"Services of the cluster get addresses, and nothing announces them.",
		"Add `[bgp]` or `[l2]`.")
	FoundNoSession = kind("no-session", SeverityDown,
		"No BGP session is established, so no router sends packets here.",
		"`steelyard peers` has the reason for each session.")
	FoundPortDown = kind("port-down", SeverityDegraded,
		"A port of an announced address has no healthy backend. Its clients are refused, or, with `on_all_down = "+
			"\"keep\"`, sent to the backends anyway.",
		"`steelyard backends` has the reason for each backend.")
	FoundAddressConflict = kind("address-conflict", SeverityDegraded,
		"Another host on the link uses the address, and may get the packets of its clients.",
		"Remove the address from the host with the MAC address in the text.")
	FoundCapacity = kind("capacity", SeverityDegraded,
		"A limit of this node was reached, and packets of new connections were dropped or reset: `flows_full`, "+
			"`snat_exhausted` or `udp_share_full`. Up to ten packets are a warning. It ends a minute after the last "+
			"packet.",
		"`steelyard flows` lists the flows by service and backend; see docs/sizing.md for the limits.")
	FoundRepliesLost = kind("replies-lost", SeverityDegraded,
		"Recent clients have lost their route on this node: a blackhole, or a more specific prefix. One client is a "+
			"warning.",
		"Compare with `ip route get CLIENT`.")
	FoundServerReplies = kind("server-replies", SeverityDegraded,
		"Clients of a server by `dsr` or `tunnel` do not continue after their first packet, and clients of the other "+
			"servers do, so its replies are probably lost. Its check is answered on another path.",
		"On that server, compare `ip route get CLIENT` with another one; then look for filters on the path.")
	FoundServerUnreached = kind("server-unreached", SeverityDegraded,
		"Packets of clients do not reach a server that is in use: it has no check, or its checks take another path.",
		"The text has the cause; `steelyard explain CLIENT VIP:PORT` has the steps.")
	FoundFromOtherNodes = kind("from-other-nodes", SeverityDegraded,
		"Kubernetes: packets that other nodes send to pods here do not reach them.",
		"Repair the route, the address of the node, the tunnel source or the key that the text names.")
)

// Protection of clients against the next fault.
var (
	FoundLessPreferred = kind("less-preferred", SeverityDegraded,
		"An address is announced with a lower preference, because something on this node does not work.",
		"`steelyard routes` has the reason.")
	FoundSessionDown = kind("session-down", SeverityDegraded,
		"A BGP session is not established; another one is.",
		"`steelyard peers` has the reason.")
	FoundBGPListen = kind("bgp-listen", SeverityDegraded,
		"The agent only connects to its BGP peers: another process has the port, so passive sessions fail.",
		"`ss -ltnp 'sport = :179'` names the process.")
	FoundBFD = kind("bfd", SeverityDegraded,
		"BFD with a peer is not up, so only the hold time detects a failure.",
		"Configure BFD on the router, or remove it here; see docs/bgp.md.")
	FoundBackendDown = kind("backend-down", SeverityDegraded,
		"Some backends are not healthy; others serve their clients.",
		"`steelyard backends` has the reason for each.")
	FoundAllBackendsDown = kind("all-backends-down", SeverityDegraded,
		"All backends on several servers failed at about the same time, so the cause is probably on this node or on "+
			"the path to the servers.",
		"Look here first: `nft list ruleset`, `ip route get SERVER`, the switch. `steelyard backends` has the reasons.")
	FoundMemberAway = kind("member-away", SeverityDegraded,
		"A member of `[l2]` does not respond: it is down, or its port is filtered.",
		"Open the port for UDP and TCP between members, or compare `secret_file`.")
	FoundMemberName = kind("member-name", SeverityDegraded,
		"Two members of `[l2]` have the same name.", "Set `node.name`.")
	FoundChecksInconclusive = kind("checks-inconclusive", SeverityDegraded,
		"This node cannot carry out health checks; backends keep their last state.",
		"Remove the shortage that the text names.")
	FoundKernelBehind = kind("kernel-behind", SeverityDegraded,
		"The kernel has not had an update of the services for more than five seconds.",
		"The log has the error of each attempt.")
	FoundInterface = kind("interface", SeverityDegraded,
		"A program is not attached to an interface as configured.",
		"The text has the cause; `bpftool net` lists programs of others.")
	FoundAPIServerAway = kind("api-server-away", SeverityDegraded,
		"The Kubernetes API server does not answer. Its last known state stays in force.",
		"Nothing needs to be done here once it answers again.")
	FoundDrained = kind("drained", SeverityDegraded,
		"An operator has drained this node or some services.", "`steelyard undrain` ends that.")
	FoundReloadRejected = kind("reload-rejected", SeverityDegraded,
		"The configuration file has errors. The previous one stays in force.",
		"`steelyard check` lists the errors.")
	FoundRestartNeeded = kind("restart-needed", SeverityDegraded,
		"Sections of the file that are read only at the start have changed.",
		"`steelyard restart` ends no connection.")
	FoundPartFails = kind("part-fails", SeverityDegraded,
		"A part of the agent fails, and is tried again.", "The text has the cause.")
	FoundInputRefused = kind("input-refused", SeverityDegraded,
		"An object or a message made a part of the agent panic, or exceeds a limit. It keeps its last state; nothing "+
			"else is affected.",
		"The log has the stack: please report it. Change or delete the object.")
	FoundNodesUnreachable = kind("nodes-unreachable", SeverityDegraded,
		"More than half of the cluster's nodes do not answer through the tunnel. They still get connections, because "+
			"the fault is probably here.",
		"Permit UDP 6090 (`datapath.tunnel_port`) and ICMP replies between the nodes: `nft list ruleset`.")
	FoundTunnelKeys = kind("tunnel-keys", SeverityDegraded,
		"The tunnel keys of the cluster cannot be read or written.",
		"The agent needs access to the Secret that docs/kubernetes.md names.")
	FoundHashSeed = kind("hash-seed", SeverityDegraded,
		"The cluster has another hash seed than this node, so routers that rehash end connections.",
		"`steelyard restart` ends no connection.")
	FoundSysctlsNotStored = kind("sysctls-not-stored", SeverityDegraded,
		"`steelyard cleanup` cannot restore sysctls, because their values could not be stored.",
		"Make the state directory writable.")
	FoundLogIncomplete = kind("log-incomplete", SeverityDegraded,
		"Lines of the log were lost in the last ten minutes: their reader is too slow, or is gone.",
		"Check the process or the disk that takes the log.")
)

// Conditions that may become a fault.
var (
	FoundConfiguration = kind("configuration", SeverityWarning,
		"The configuration is valid, but probably not what was meant.", "")
	FoundFileChanged = kind("file-changed", SeverityWarning,
		"The configuration file is not the one in force: it was edited, or can no longer be read. The next start "+
			"would use it.",
		"`steelyard diff` prints the difference, `steelyard reload` puts the file in force, and `steelyard config "+
			"show` prints the one in force.")
	FoundHiddenPrograms = kind("hidden-programs", SeverityWarning,
		"The kernel shows programs of others only to processes with `CAP_SYS_ADMIN`: whether they pass packets on is "+
			"not verified.",
		"`bpftool prog show id ID` names a program; `steelyard cleanup` removes one of an earlier agent.")
	FoundTableSize = kind("table-size", SeverityWarning,
		"The flow tables keep the size of an earlier `max_flows`, because another size would end all connections.", "")
	FoundPinsWritable = kind("pins-writable", SeverityWarning,
		"Other users may write to the bpffs, and could keep the agent from starting.", "")
	FoundPinsLost = kind("pins-lost", SeverityWarning,
		"Files under `/sys/fs/bpf/steelyard` cannot be restored, so the next start of the agent ends all connections.",
		"Mount a bpffs on `/sys/fs/bpf`.")
	FoundUnverified = kind("unverified", SeverityWarning,
		"The kernel does not run synthetic packets, for example without memory: faults that begin now are not noticed.",
		"Remove the shortage that the text names.")
	FoundNoPackets = kind("no-packets", SeverityWarning,
		"Clients sent packets to an announced address, and have sent none for a minute. They have stopped, or the "+
			"packets do not get here.",
		"If clients fail, look for a filter or a limit of routes on the router: `birdc show route filtered` (BIRD), "+
			"`show bgp neighbors NODE filtered-routes` (FRR), `ip neigh` with `[l2]`.")
	FoundNodeUnreachable = kind("node-unreachable", SeverityWarning,
		"A node of the cluster does not answer through the tunnel, so this node sends no new connections to its pods.",
		"If the node runs, permit UDP 6090 (`datapath.tunnel_port`) from this node to it.")
	FoundNoDefaultRoute = kind("no-default-route", SeverityWarning,
		"There was no default route at the start, so only clients on the links of this node get replies.",
		"Add a default route if there are other clients.")
	FoundTunnelKeyMismatch = kind("tunnel-key-mismatch", SeverityWarning,
		"Packets from a tunnel source come without a valid key: they are forged, or the sender has none for us.",
		"Add this node to `tunnel_sources` of the sender, and compare the key files (docs/keys.md).")
)
