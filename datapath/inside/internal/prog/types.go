// Package prog holds the compiled programs of the service proxy (datapath/bpf/inside.bpf.c) and names for their types.
package prog

import "github.com/cilium/ebpf"

// Types of maps, as in datapath/bpf/inside_maps.h.
type (
	Addr        = InAddr
	Tuple       = InTuple
	ServiceKey  = InInServiceKey
	Service     = InInService
	EndpointKey = InInEndpointKey
	Endpoint    = InInEndpoint
	MemberKey   = InInMemberKey
	AllowKey    = InInAllowKey
	FlowKey     = InInFlowKey
	Flow        = InInFlow
	Device      = InInDevice
	Source      = InInSource
	Ranges      = InInRanges
	SockKey     = InInSockKey
)

// Values of enumerations and flags.
const (
	Inside  = uint8(InInScopeIN_INSIDE)
	Outside = uint8(InInScopeIN_OUTSIDE)
	Pod     = uint8(InInKindIN_POD)
	Uplink  = uint8(InInKindIN_UPLINK)
	Arrives = uint8(InInPlaceIN_ARRIVES)
	Leaves  = uint8(InInPlaceIN_LEAVES)

	// Modes. Without one, this service proxy is the only one.
	Beside   = uint32(InInModeIN_BESIDE)
	Draining = uint32(InInModeIN_DRAINING)

	Seen, FIN, RST = 1, 2, 4 // flags of Flow
	FromOutside    = 8
	Confirmed      = 16
	Reply          = 32
	Own, Cluster   = 1, 2 // kinds of addresses
	Shared         = 4
	NodePorts      = 8
)

// Objects are the programs and maps that are loaded. The object file has more, which they do not use.
type Objects struct {
	Arrive *ebpf.Program `ebpf:"sy_in_arrive"`
	Leave  *ebpf.Program `ebpf:"sy_in_leave"`
	Send   *ebpf.Program `ebpf:"sy_in_send"`

	Connect4 *ebpf.Program `ebpf:"sy_in_connect4"`
	Connect6 *ebpf.Program `ebpf:"sy_in_connect6"`
	Sendmsg4 *ebpf.Program `ebpf:"sy_in_sendmsg4"`
	Sendmsg6 *ebpf.Program `ebpf:"sy_in_sendmsg6"`
	Recvmsg4 *ebpf.Program `ebpf:"sy_in_recvmsg4"`
	Recvmsg6 *ebpf.Program `ebpf:"sy_in_recvmsg6"`
	Peer4    *ebpf.Program `ebpf:"sy_in_peer4"`
	Peer6    *ebpf.Program `ebpf:"sy_in_peer6"`

	Services  *ebpf.Map `ebpf:"sy_in_services"`
	Endpoints *ebpf.Map `ebpf:"sy_in_endpoints"`
	Members   *ebpf.Map `ebpf:"sy_in_members"`
	Allow     *ebpf.Map `ebpf:"sy_in_allow"`
	Flows     *ebpf.Map `ebpf:"sy_in_flows"`
	Addrs     *ebpf.Map `ebpf:"sy_in_addrs"`
	Devices   *ebpf.Map `ebpf:"sy_in_devices"`
	Sources   *ebpf.Map `ebpf:"sy_in_sources"`
	Ranges    *ebpf.Map `ebpf:"sy_in_ranges"`
	Direct    *ebpf.Map `ebpf:"sy_in_direct"`
	Outside   *ebpf.Map `ebpf:"sy_in_outside"`
	Counters  *ebpf.Map `ebpf:"sy_in_counters"`
	Connected *ebpf.Map `ebpf:"sy_in_sockets"`
	Affinity  *ebpf.Map `ebpf:"sy_in_affinity"`
	Frags     *ebpf.Map `ebpf:"sy_frags"`
}

// Socket is a program for a system call of this node's processes.
type Socket struct {
	Name    string
	At      ebpf.AttachType
	Program *ebpf.Program
}

// Sockets returns the programs for system calls.
func (o *Objects) Sockets() []Socket {
	return []Socket{
		{"connect4", ebpf.AttachCGroupInet4Connect, o.Connect4},
		{"connect6", ebpf.AttachCGroupInet6Connect, o.Connect6},
		{"sendmsg4", ebpf.AttachCGroupUDP4Sendmsg, o.Sendmsg4},
		{"sendmsg6", ebpf.AttachCGroupUDP6Sendmsg, o.Sendmsg6},
		{"recvmsg4", ebpf.AttachCGroupUDP4Recvmsg, o.Recvmsg4},
		{"recvmsg6", ebpf.AttachCGroupUDP6Recvmsg, o.Recvmsg6},
		{"peer4", ebpf.AttachCgroupInet4GetPeername, o.Peer4},
		{"peer6", ebpf.AttachCgroupInet6GetPeername, o.Peer6},
	}
}

// Close closes all descriptors.
func (o *Objects) Close() {
	for _, p := range []*ebpf.Program{o.Arrive, o.Leave, o.Send} {
		p.Close()
	}
	for _, s := range o.Sockets() {
		s.Program.Close()
	}
	for _, m := range []*ebpf.Map{
		o.Services, o.Endpoints, o.Members, o.Allow, o.Flows, o.Addrs, o.Devices, o.Sources, o.Ranges, o.Direct,
		o.Outside, o.Counters, o.Connected, o.Affinity, o.Frags,
	} {
		m.Close()
	}
}
