package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// Config is a valid configuration file with every default filled in.
type Config struct {
	Node       Node
	Datapath   Datapath
	BGP        *BGP // nil if off
	L2         *L2  // nil if off
	Pools      []Pool
	Services   []Service
	Kubernetes *Kubernetes // nil if off
	Probe      Probe
	Admin      Admin
	Log        Log
	// Warnings describe legal but useless settings, each in one line with the format of an Error.
	Warnings []string
	// Force is the code that lets a reload make one change it would otherwise refuse, or "".
	Force string
	// Text is the file's content.
	Text string
	// Empty says that the file contains only white space. This is legal, but may also result from an editor that saved
	// to a full disk.
	Empty bool
	// decodeAgain has the names of services that ParseAfter always decodes: those with warnings, and those with the
	// content of another file.
	decodeAgain map[string]bool
}

// Node describes this node. Zero fields are derived from the system.
type Node struct {
	Name     string     // default: NODE_NAME if set, or the host name
	RouterID netip.Addr // IPv4; default: the address of the default route's interface
	Address  netip.Addr // peers and tunnels use it; default: RouterID
}

// Values of Datapath.Mode.
const (
	ModeAuto       = "auto" // native XDP if the driver supports it, otherwise tc
	ModeXDP        = "xdp"
	ModeXDPGeneric = "xdp-generic"
	ModeTC         = "tc"
)

// Datapath configures how packets are forwarded.
type Datapath struct {
	Interfaces []string    // uplinks; empty means the default route's interface
	Mode       string      // ModeAuto, ModeXDP, ModeXDPGeneric or ModeTC
	MaxFlows   int         // capacity of the table of established flows, 1 to 100,000,000
	SNATPorts  []PortRange // source ports for nat; disjoint
	TunnelPort uint16      // UDP port of tunnels
	// TunnelSources are the sources whose GUE tunnels this node accepts. Empty means none.
	TunnelSources []netip.Prefix
	// TunnelKeys are the keys for tunnels between nodes, or empty if there is no key file. The agent sends the first
	// and accepts all.
	TunnelKeys []Secret
	HashSeed   Secret // seeds the hashes that choose a backend; if not set, a constant does
	Timeouts   Timeouts
	// LocalClients balances this machine's own TCP connections to services with forward = "nat".
	LocalClients bool
	// AllowUntestedKernel accepts a kernel before 6.1 if it has every feature the programs use.
	AllowUntestedKernel bool
}

// PortRange is a range of ports that includes First and Last.
type PortRange struct{ First, Last uint16 }

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// Timeouts are the idle timeouts of flows, 1 s to 7 days each.
type Timeouts struct {
	HalfOpen    time.Duration // the handshake is not complete
	Established time.Duration // TCP and SCTP
	Closing     time.Duration // one side has sent a FIN
	Closed      time.Duration // both sides have sent one
	UDP         time.Duration
}

// BGP configures the BGP speaker.
type BGP struct {
	ASN         uint32
	ListenPort  int // -1 means connect but do not listen
	Peers       []Peer
	Communities []Community
	LocalPref   uint32
	// AggregateV4 and AggregateV6 are the announced prefix lengths. Prefixes shorter than 32 and 128 bits contain only
	// addresses of pools announced over BGP.
	AggregateV4, AggregateV6 int
	// RestartTime is how long peers keep the routes while the agent is down, in whole seconds up to 4095 s. 0 turns off
	// graceful restart.
	RestartTime time.Duration
	// LongLivedRestartTime is how long peers keep the routes after RestartTime, with the lowest preference (RFC 9494),
	// in whole seconds of 24 bits. 0 turns this off; any other value requires a RestartTime.
	LongLivedRestartTime time.Duration
	// MaxRoutes is the maximum number of announced prefixes.
	MaxRoutes int
	// GracefulShutdown is how long routes have the lowest preference before a drain or agent shutdown withdraws them,
	// up to 10 s. 0 means that they are withdrawn immediately.
	GracefulShutdown time.Duration
	Weighted         lb.Weighted
}

// Attributes are additional path attributes of routes. The zero value changes nothing.
type Attributes struct {
	Communities []Community
	LocalPref   *uint32 // nil for BGP.LocalPref
	MED         *uint32 // nil for none
}

// Peer is one BGP neighbour.
type Peer struct {
	// Exactly one is set: the peer's address, with a zone if it is link-local; an interface where the peer is the only
	// router; or the range of addresses from which peers connect.
	Address         netip.Addr
	Interface       string
	ListenRange     netip.Prefix
	ASN             uint32 // 0 with External
	External        bool   // any AS except this node's
	LocalASN        uint32 // the AS number that the peer sees; 0 for BGP.ASN
	Passive         bool
	ConnectRetry    time.Duration // mean time between attempts to connect
	Keepalive       time.Duration // time between KEEPALIVEs; 0 for a third of the hold time
	Port            uint16
	Password        Secret        // TCP MD5 (RFC 2385), 1 to 80 bytes; zero for none
	HoldTime        time.Duration // 0, or whole seconds from 3 to 65535 (RFC 4271 §4.2)
	MaxReceived     uint32        // more received routes are reported; 0 for any number
	Multihop        int           // TTL of a multihop eBGP session; 0 if directly connected
	TTLSecurity     bool          // RFC 5082; excludes Multihop
	Source          netip.Addr    // same family as Address; if zero, the kernel chooses
	Device          string        // interface or VRF of the session; empty for any interface outside VRFs
	GracefulRestart bool
	BFD             BFD
	NodeSelector    string   // label selector; "" for every node
	Pools           []string // the peer receives only these pools' routes; empty for all routes
	Attributes      Attributes
	Prepend         int // additional times ASN is prepended to the AS path; 0 for a peer in the same AS
}

// BFD configures the detection of peer failures (RFC 5880). The zero value disables it.
type BFD struct {
	Interval   time.Duration // between packets in both directions
	Multiplier int           // lost packets after which the session fails, 1 to 255
	Multihop   bool          // RFC 5883
	MinTTL     int           // with Multihop, the lowest TTL of received packets; 0 for any
}

// L2 configures announcements with ARP and NDP.
type L2 struct {
	Interfaces []string // empty means the uplinks
	// Members are the other machines that announce the same addresses. Empty means the nodes of the cluster, or none.
	Members []netip.Addr
	Port    uint16 // membership, UDP and TCP
	// Secrets encrypt the messages between members, 16 to 80 bytes each. The first encrypts sent messages; any of them
	// decrypts received ones. If there are none, the tunnel keys are used.
	Secrets []Secret
	// Unencrypted says that messages are neither encrypted nor authenticated.
	Unencrypted bool
	// ProbeOwn is the interval between probes for other hosts that use this node's addresses. 0 disables them.
	ProbeOwn time.Duration
	// SpreadLocal says that the owner of an address spreads connections over all nodes with endpoints, even for
	// externalTrafficPolicy Local.
	SpreadLocal bool
}

// Pool is a set of addresses that may be assigned to services and announced.
type Pool struct {
	Name   string
	Ranges []lb.AddrRange // disjoint within and across pools
	// Nodes means the cluster nodes' own addresses instead of Ranges. At most one pool has them.
	Nodes bool
	// Announce lists announcers that are on. Empty means every such announcer.
	Announce        []lb.AnnouncerKind
	AutoAssign      bool   // assign its addresses to services that do not request a pool
	AvoidBuggyIPs   bool   // skip addresses that end in .0 or .255
	Class           string // of the Services; "" means any
	Namespaces      []string
	ServiceSelector string
	Priority        int  // lower values first
	ExternalIPs     bool // Services may use its addresses as spec.externalIPs
	ShareAcross     bool // Services in different namespaces may share an address if their keys match
	// Grace is how long a cluster Service's address is served after its removal from the pool.
	Grace      time.Duration
	Attributes Attributes
	Prepend    int // for peers without a Peer.Prepend of their own
	// AggregateV4 and AggregateV6 are the announced lengths of prefixes within the pool. 0 means BGP's value.
	AggregateV4, AggregateV6 int
}

// Contains reports whether addr is in the pool.
func (p *Pool) Contains(addr netip.Addr) bool {
	for _, r := range p.Ranges {
		if r.Contains(addr) {
			return true
		}
	}
	return false
}

// Service is a service in the file, with everything an lb.Service needs.
type Service struct {
	Name string
	// Addresses are the addresses in the file. If there are none, one is allocated per family that Pool and Backends
	// have in common.
	Addresses []netip.Addr
	// Pool is the requested pool, or "" if Addresses are requested.
	Pool       string
	Ports      []lb.Port // in the order of the file
	Backends   []lb.Backend
	Algorithm  lb.Algorithm
	Method     lb.Method
	Encap      lb.Encap
	SNAT       bool // with MethodNAT; if false, backends see the client's address
	Affinity   time.Duration
	Allow      []netip.Prefix
	MinHealthy int
	OnDown     string // OnDownReset or OnDownKeep, for the open connections of an unhealthy backend
	OnAllDown  string // for an address without healthy backends
	Check      lb.CheckSpec
	// Announce is copied from the pool that contains the addresses. Empty means every announcer that is on.
	Announce []lb.AnnouncerKind
	// AddressPerNode requests one address of each family per L2 member, each announced by a different member.
	AddressPerNode bool
}

// AnnouncesL2 reports whether L2 announces addresses with these announcers. Empty means every announcer that is on.
func (c *Config) AnnouncesL2(by []lb.AnnouncerKind) bool {
	return c.L2 != nil && (len(by) == 0 || slices.Contains(by, lb.AnnounceL2))
}

// Values of Kubernetes.Proxy.
const (
	ProxyAuto      = "auto"
	ProxyKubeProxy = "kube-proxy" // kube-proxy serves health check node ports and ClusterIPs
	ProxyReplace   = "replace"    // the agent serves them
)

// Kubernetes configures a cluster as a source of services.
type Kubernetes struct {
	Kubeconfig string // "" means the pod's credentials
	// LoadBalancerClasses are distinct; "" means Services without a class. There is at least one.
	LoadBalancerClasses []string
	Allocate            bool
	Proxy               string    // ProxyAuto, ProxyKubeProxy or ProxyReplace
	Forward             lb.Method // to pods on other nodes: MethodTunnel or MethodNAT
	// ExcludeNodes are the node states in which a node announces nothing, in addition to those that Kubernetes defines.
	ExcludeNodes []string
	// IgnoreExcludeLabel ignores the Node label that excludes a node from external load balancers.
	IgnoreExcludeLabel bool
	APIServers         []string       // "host:port"; empty: the kubeconfig's, or the pod's
	HealthAddresses    []netip.Prefix // listen addresses of health check node ports and 10256; empty for all
	NodePortAddresses  []netip.Prefix // this node's, at which node ports answer with ProxyReplace; empty for all
	// NoSocketLB leaves the node's own TCP connections to the packets' path, with ProxyReplace.
	NoSocketLB bool
	// AnyExternalIP makes ProxyReplace also serve the addresses in spec.externalIPs that are in no pool.
	AnyExternalIP bool
	// PanicHold is how long a Service's last endpoints are kept if none is usable after the connection to the API
	// server was interrupted. 0 disables this.
	PanicHold time.Duration
	// NodeProbe is the interval at which this node probes other nodes through the tunnel. 0 disables the probes.
	NodeProbe time.Duration
	// MaxEndpointsPerService limits the pairs of endpoint and port per Service. It is at least 1.
	MaxEndpointsPerService int
}

// Values of Kubernetes.ExcludeNodes.
const (
	NodeNotReady      = "not-ready"
	NodeUnschedulable = "unschedulable" // cordoned
)

// Probe configures the probes of health check node ports and the service proxy.
type Probe struct {
	Interval, Timeout time.Duration // Timeout ≤ Interval
	Fall, Rise        int
	ProxyHealthz      string // URL
	// OnAllDown says what to do if the service proxies of all nodes fail: OnAllDownKeep or OnAllDownWithdraw.
	OnAllDown string
	Hold      time.Duration // minimum time that a withdrawn address stays withdrawn
}

// Values of Service.OnDown.
const (
	OnDownReset = "reset"
	OnDownKeep  = "keep"
)

// Values of Probe.OnAllDown and Service.OnAllDown.
const (
	OnAllDownKeep     = "keep"
	OnAllDownWithdraw = "withdraw"
	// OnAllDownUnanswered is OnAllDownKeep while no backend reports that it is draining. It is the default of checks of
	// type lb.CheckNodePort, and cannot be written.
	OnAllDownUnanswered = "unanswered"
)

// Admin configures the agent's API.
type Admin struct {
	Socket string   // absolute path, at most 107 bytes
	Hosts  []string // host names accepted in requests to Listen
	Listen string   // "address:port", read-only; "" for nowhere
	// Token, if set, is the bearer token required in requests to Listen.
	Token Secret
	Allow []netip.Prefix // sources that Listen accepts; empty for all
	// TLSCert and TLSKey are PEM files for Listen, or "" for no TLS. They matched when the configuration was read.
	TLSCert, TLSKey string
}

// Log configures the agent's log.
type Log struct {
	Level  slog.Level
	Format string // "text" or "json"
}

// Default returns the configuration of an empty file.
func Default() *Config {
	return &Config{
		Datapath: Datapath{
			Mode: ModeAuto, MaxFlows: 1 << 18, TunnelPort: 6090, LocalClients: true,
			SNATPorts: []PortRange{{1024, 32767}, {61000, 65535}},
			Timeouts: Timeouts{
				HalfOpen: 30 * time.Second, Established: 130 * time.Minute, Closing: 4 * time.Minute,
				Closed: 10 * time.Second, UDP: 3 * time.Minute,
			},
		},
		Probe: Probe{
			Interval: time.Second, Timeout: 500 * time.Millisecond, Fall: 2, Rise: 1,
			ProxyHealthz: "http://127.0.0.1:10256/healthz", OnAllDown: OnAllDownKeep,
		},
		Admin: Admin{Socket: "/run/steelyard/steelyard.sock"},
		Log:   Log{Level: slog.LevelInfo, Format: "text"},
	}
}

// Load reads and parses a file and applies additional rules. The error is of type Errors and has every error in the
// file.
func Load(file string, rules ...Rule) (*Config, error) {
	text, err := Read(file)
	if err != nil {
		return nil, err
	}
	return Parse(file, text, rules...)
}

// maxSize is the maximum file size, in bytes. Without a limit, an endless file would use all memory.
const maxSize = 64 << 20

var errTooLarge = fmt.Errorf("it is larger than %d MiB", maxSize>>20)

// Read returns the content of a file. The error is of type Errors.
func Read(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, Errors{unreadable(file, err)}
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err == nil && len(text) > maxSize {
		err = errTooLarge
	}
	if err != nil {
		return nil, Errors{unreadable(file, err)}
	}
	return text, nil
}

func unreadable(file string, err error) Error {
	e := Error{File: file, Problem: "cannot be read: " + err.Error(), Hint: "name the file with -c", cause: err}
	var pe *fs.PathError
	if errors.As(err, &pe) {
		e.Problem = fmt.Sprintf("cannot be read: %v", pe.Err)
	}
	if errors.Is(err, fs.ErrPermission) {
		e.Hint = "use sudo"
	}
	return e
}

// Parse parses text. file names it in errors, and relative names of secret files are relative to its directory. Parse
// reads no other files. The error is of type Errors and has every error in the text.
func Parse(file string, text []byte, rules ...Rule) (*Config, error) {
	return newDecoder(file).decode(text, rules...)
}
