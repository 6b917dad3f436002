// Package inside is the service proxy of a node: it serves the connections that the node and its pods open to Services,
// and those that other machines open to the node's own addresses (node ports). With it a node needs no kube-proxy.
// Connections of other machines to VIPs are package datapath's.
//
// # Pods
//
// The program sy_in_arrive, at tc ingress of the node's side of each pod's device, replaces a Service's address with an
// endpoint's and passes the packet on. sy_in_leave, at tc egress of the same device, puts the Service's address back
// into the reply. So everything between them, connection tracking, network policies, masquerading, routes, tunnels,
// sees only client and endpoint, as with kube-proxy. A pod that is its own endpoint receives its packets from the
// Service's address, by a redirect into its own device. If client and endpoint are behind one bridge, the frame is
// addressed to the endpoint, because connection tracking would drop packets of a flow that it sees in one direction.
//
// Uplinks have the same two programs. There they serve node ports. An endpoint on another node gets this node's address
// as source, so that it replies through this node.
//
// # The node itself
//
// TCP connections of the node's processes are opened to an endpoint at connect(2). Everything else, such as UDP and
// sockets of the kernel, leaves by a route to the device sy0, whose egress program sends it to the endpoint. Replies
// enter through sy0, which satisfies a strict reverse-path filter. A UDP socket keeps its endpoint only by a flow, so
// another endpoint serves its next datagram when that one leaves. No packet to a Service leaves the node untranslated.
// Datagrams to the node's own addresses never leave the stack, so they are translated at connect(2) and sendmsg(2):
// there a connected socket keeps its endpoint, and an unconnected one gets another with each datagram.
//
// # Flows
//
// A flow has two entries in one hash map, one for each direction, keyed by addresses and ports where the packet is
// looked up. It is not an LRU map, which could forget live connections; a full table refuses new flows, and flows of
// other machines may use half of it. FIN, RST and idle times end flows (idle in flows.go). A new flow chooses an
// endpoint at random, or, with affinity, the client's last one. A SYN that is sent again because the endpoint has not
// answered opens the flow anew. When an endpoint leaves its Service, its UDP flows end. TCP connections go on; those
// that nothing can answer are reset (left.go).
//
// The greatest risk is a reply of a connection without a Service that looks like one of a flow. So a SYN or datagram
// that is for no Service removes the entry of an ended flow with its addresses and ports, and gets another source port
// beside a live one; and a new flow gets another source port if its client's network namespace, or connection tracking
// for another machine's client, has a direct connection with these addresses and ports.
//
// # Without the agent
//
// The programs and maps stay in the kernel. A second process (Watch) attaches the programs to the
// devices of pods that start while the agent is not running.
//
// # Trace
//
// During a trace (package datapath), programs that record packets are on the devices, built from the same steps with
// the same maps. A filter or link is replaced in place, so each packet is processed by one program or the other.
//
// # Beside another service proxy
//
// When this proxy takes over, the other one's connections stay with connection tracking, which translates them. So a
// packet that opens no connection and belongs to no flow passes, as does a datagram or repeated SYN of a connection
// that the kernel translates. Empty nat chains make the kernel go on when the other's tables are gone (older.go). When
// this proxy gives back, new connections pass, and its flows go on until they end.
//
// # Not served
//
// Pods behind IPVLAN and MACVLAN.
package inside
