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

// Config is a whole configuration file: valid, and with every default filled in.
type Config struct {
	Node       Node
	Datapath   Datapath
	BGP        *BGP // nil: off
	L2         *L2  // nil: off
	Pools      []Pool
	Services   []Service
	Kubernetes *Kubernetes // nil: off
	Probe      Probe
	Admin      Admin
	Log        Log
	// Warnings are legal but useless settings, one line each in the form of an Error.
	Warnings []string
	// Force is the word that allows one change that a reload would otherwise refuse, or "".
	Force string
	// Text is the content of the file.
	Text string
	// Empty says that the file contains only white space. This is legal, but also what an editor leaves behind on a
	// full disk.
	Empty bool
}

// Node describes this node. Zero fields are derived from the system.
type Node struct {
	Name     string     // default: NODE_NAME, or otherwise the host name
	RouterID netip.Addr // IPv4; default: the address of the interface of the default route
	Address  netip.Addr // used by peers and tunnels; default: RouterID
}

// Modes of attaching the datapath.
const (
	ModeAuto       = "auto" // native XDP if the driver supports it, otherwise tc
	ModeXDP        = "xdp"
	ModeXDPGeneric = "xdp-generic"
	ModeTC         = "tc"
)

// Datapath configures how packets are forwarded.
type Datapath struct {
	Interfaces []string    // uplinks; empty means the interface of the default route
	Mode       string      // ModeAuto, ModeXDP, ModeXDPGeneric or ModeTC
	MaxFlows   int         // entries of the table of established flows, 1 to 100,000,000
	SNATPorts  []PortRange // source ports for nat; they do not overlap
	TunnelPort uint16      // UDP port of tunnels
	// TunnelSources are the sources whose GUE tunnels this node accepts. Empty means none.
	TunnelSources []netip.Prefix
	// TunnelKeys are the keys for tunnels between nodes. The first one is sent, all are accepted. There are none
	// without a file.
	TunnelKeys []Secret
	HashSeed   Secret // for the hashes that choose a backend; a constant if not set
	Timeouts   Timeouts
	// AllowUntestedKernel accepts a kernel before 6.1 that has what the programs use.
	AllowUntestedKernel bool
}

// PortRange is a range of ports.
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
	ListenPort  int // -1 means do not listen, only connect
	Peers       []Peer
	Communities []Community
	LocalPref   uint32
	// AggregateV4 and AggregateV6 are the announced prefix lengths. All addresses they cover are in pools announced
	// over BGP, or they are 32 and 128.
	AggregateV4, AggregateV6 int
	// RestartTime is how long peers keep the routes while the agent is down, in whole seconds up to 4095 s. 0 means not
	// at all.
	RestartTime time.Duration
	// LongLivedRestartTime is how long peers keep the routes after RestartTime, with the lowest preference (RFC 9494),
	// in whole seconds of 24 bits. 0 means not at all; otherwise RestartTime is not 0.
	LongLivedRestartTime time.Duration
	// MaxRoutes is the maximum number of announced prefixes.
	MaxRoutes int
	// GracefulShutdown is how long routes have the lowest preference before they are withdrawn because of a drain or
	// agent shutdown, up to 10 s. 0 means that they are withdrawn at once.
	GracefulShutdown time.Duration
	Weighted         lb.Weighted
}

// Attributes are path attributes of routes, in addition to those of BGP. The zero value changes nothing.
type Attributes struct {
	Communities []Community
	LocalPref   *uint32 // nil for BGP.LocalPref
	MED         *uint32 // nil for none
}

// Peer is one BGP neighbour.
type Peer struct {
	// Exactly one is set: the address, which may have a zone if it is link-local; an interface whose only router is the
	// peer; or the addresses from which peers connect to this node.
	Address         netip.Addr
	Interface       string
	ListenRange     netip.Prefix
	ASN             uint32 // 0 with External
	External        bool   // any AS but this node's
	LocalASN        uint32 // towards the peer; 0 for that of BGP
	Passive         bool
	ConnectRetry    time.Duration // mean time between attempts to connect
	Keepalive       time.Duration // time between KEEPALIVEs; 0 for a third of the hold time
	Port            uint16
	Password        Secret        // TCP MD5 (RFC 2385), 1 to 80 bytes; zero for none
	HoldTime        time.Duration // 0, or whole seconds from 3 to 65535 (RFC 4271 §4.2)
	MaxReceived     uint32        // routes before it is reported; 0 for any number
	Multihop        int           // TTL of a multihop eBGP session; 0 if directly connected
	TTLSecurity     bool          // RFC 5082; never together with Multihop
	Source          netip.Addr    // of the family of Address; if zero, the kernel chooses
	Device          string        // interface or VRF of the session; empty for any interface outside VRFs
	GracefulRestart bool
	BFD             BFD
	NodeSelector    string   // label selector; "" for every node
	Pools           []string // names of the pools whose routes it receives; empty for all routes
	Attributes      Attributes
	Prepend         int // how many more times ASN is prepended to the AS path; 0 for a peer in the same AS
}

// BFD configures the detection of peer failures (RFC 5880). The zero value turns it off.
type BFD struct {
	Interval   time.Duration // between packets in both directions
	Multiplier int           // lost packets that make the session fail, 1 to 255
	Multihop   bool          // RFC 5883
	MinTTL     int           // with Multihop, the lowest TTL of received packets; 0 for any
}

// L2 configures announcements with ARP and NDP.
type L2 struct {
	Interfaces []string // empty means the uplinks
	// Members are the other machines with the same addresses. Empty means that there are none, or that they are the
	// nodes of the cluster.
	Members []netip.Addr
	Port    uint16 // membership, UDP and TCP
	// Secrets encrypt the messages between members, of 16 to 80 bytes each. The first one encrypts sent messages; all
	// are accepted. If there are none, the tunnel keys are used.
	Secrets []Secret
	// Unencrypted says that there is no key and messages are not authenticated.
	Unencrypted bool
	// ProbeOwn is how often this node probes for other hosts that have its addresses. 0 means never.
	ProbeOwn time.Duration
	// SpreadLocal says that the owner of an address spreads connections over all nodes with endpoints even under the
	// policy Local.
	SpreadLocal bool
}

// Pool is a set of addresses that may be assigned to services and announced.
type Pool struct {
	Name   string
	Ranges []lb.AddrRange // disjoint, within one pool and between pools
	// Announce are the announcers, all of which are on. Empty means all that are on.
	Announce        []lb.AnnouncerKind
	AutoAssign      bool   // assign its addresses to services that do not request a pool
	AvoidBuggyIPs   bool   // skip addresses that end in .0 or .255
	Class           string // of the Services; "" means any
	Namespaces      []string
	ServiceSelector string
	Priority        int  // lower comes first
	ExternalIPs     bool // Services may use its addresses as spec.externalIPs
	ShareAcross     bool // Services of all namespaces may share its addresses by key
	// Grace is how long a cluster Service's address is still served after it was removed from the pool.
	Grace      time.Duration
	Attributes Attributes
	Prepend    int // like Peer.Prepend, for peers without one
	// AggregateV4 and AggregateV6 are the announced prefix lengths, for prefixes within the pool. 0 means as in BGP.
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
	// Addresses are the addresses in the file. If there are none, one is allocated per family that both Pool and
	// Backends have.
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
	OnAllDown  string // OnAllDownWithdraw or OnAllDownKeep, for an address without healthy backends
	Check      lb.CheckSpec
	// Announce is from the pool that contains the addresses. Empty means all announcers that are on.
	Announce []lb.AnnouncerKind
	// AddressPerNode says that the service should have one address of each family per member of L2, on different
	// members.
	AddressPerNode bool
}

// AnnouncesL2 reports whether addresses with these announcers are announced by L2. Empty means all that are on.
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
	// ExcludeNodes are node states, in addition to Kubernetes' own, in which this node announces nothing.
	ExcludeNodes []string
	// IgnoreExcludeLabel says that nodes announce even if they have the label that excludes them from external load
	// balancers.
	IgnoreExcludeLabel bool
	HealthAddresses    []netip.Prefix // where health check node ports and 10256 listen; empty means everywhere
	// PanicHold is how long the last endpoints of a Service are kept when none is usable after an interruption of the
	// connection to the API server. 0: not at all.
	PanicHold time.Duration
	// NodeProbe is the interval at which this node probes others through the tunnel. 0: not at all.
	NodeProbe time.Duration
	// MaxEndpointsPerService limits a Service's pairs of endpoint and port. It is at least 1.
	MaxEndpointsPerService int
}

// The states in which a node may be excluded.
const (
	NodeNotReady      = "not-ready"
	NodeUnschedulable = "unschedulable" // cordoned
)

// Probe configures the probes of health check node ports and the service proxy.
type Probe struct {
	Interval, Timeout time.Duration // Timeout ≤ Interval
	Fall, Rise        int
	ProxyHealthz      string // URL
	// OnAllDown says what to do when the service proxies of all nodes fail: OnAllDownKeep or OnAllDownWithdraw.
	OnAllDown string
	Hold      time.Duration // how long a withdrawn address stays withdrawn at least
}

// Values of on_down of a service.
const (
	OnDownReset = "reset"
	OnDownKeep  = "keep"
)

// Values of Probe.OnAllDown and of on_all_down of a service.
const (
	OnAllDownKeep     = "keep"
	OnAllDownWithdraw = "withdraw"
)

// Admin configures the agent's API.
type Admin struct {
	Socket string   // absolute path, at most 107 bytes
	Hosts  []string // the node's names in requests to Listen
	Listen string   // "address:port", read-only; "" for nowhere
	// Token is the bearer token that requests to Listen must have, if it is set.
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
			Mode: ModeAuto, MaxFlows: 1_000_000, TunnelPort: 6090,
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

// Load reads and parses a file and applies additional rules. The error is an Errors with all errors in the file.
func Load(file string, rules ...Rule) (*Config, error) {
	text, err := Read(file)
	if err != nil {
		return nil, err
	}
	return Parse(file, text, rules...)
}

// maxSize is the maximum file size, in bytes. An endless file would use all memory.
const maxSize = 64 << 20

var errTooLarge = fmt.Errorf("it is larger than %d MiB", maxSize>>20)

// Read returns the text of a file. The error is an Errors.
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

// Parse parses text. file is used in errors; relative names of secret files are relative to its directory, and nothing
// else is read. The error is an Errors with all errors in the text.
func Parse(file string, text []byte, rules ...Rule) (*Config, error) {
	return newDecoder(file).decode(text, rules...)
}

// ParseElsewhere is Parse for another machine's configuration: it is not an error if this machine lacks the secret
// files.
func ParseElsewhere(file string, text []byte, rules ...Rule) (*Config, error) {
	d := newDecoder(file)
	d.elsewhere = true
	return d.decode(text, rules...)
}
