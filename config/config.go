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
	// Force is the word that allows one change that a reload would refuse; "": none.
	Force string
	// Text is the file.
	Text string
	// Empty: the file has white space at most. This is legal, and also what an editor leaves on a full disk.
	Empty bool
}

// Node describes this node. Zero fields are derived from the system.
type Node struct {
	Name     string     // default: NODE_NAME, else the host name
	RouterID netip.Addr // IPv4; default: the address of the interface of the default route
	Address  netip.Addr // used by peers and tunnels; default: RouterID
}

// Modes of attaching the datapath.
const (
	ModeAuto       = "auto" // native XDP where the driver has it, else tc
	ModeXDP        = "xdp"
	ModeXDPGeneric = "xdp-generic"
	ModeTC         = "tc"
)

// Datapath is how packets are forwarded.
type Datapath struct {
	Interfaces []string    // uplinks; empty: the interface of the default route
	Mode       string      // ModeAuto, ModeXDP, ModeXDPGeneric or ModeTC
	MaxFlows   int         // entries of the table of established flows, 1 to 100,000,000
	SNATPorts  []PortRange // source ports used when forwarding by nat; they do not overlap
	TunnelPort uint16      // UDP port of tunnels
	// TunnelSources are the sources whose GUE tunnels this node accepts; empty: none.
	TunnelSources []netip.Prefix
	// TunnelKeys are the keys of tunnels between nodes: the first one is sent, all are accepted. None: no file.
	TunnelKeys []Secret
	HashSeed   Secret // of the hashes that choose a backend; not set: a constant
	Timeouts   Timeouts
}

// PortRange is a range of ports.
type PortRange struct{ First, Last uint16 }

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// Timeouts are the idle timeouts of flows, 1 s to 7 days each.
type Timeouts struct {
	HalfOpen    time.Duration // the handshake is not complete
	Established time.Duration // TCP and SCTP
	Closing     time.Duration // one side has sent a FIN
	Closed      time.Duration // both sides have
	UDP         time.Duration
}

// BGP configures the BGP speaker.
type BGP struct {
	ASN         uint32
	ListenPort  int // -1: do not listen, only connect
	Peers       []Peer
	Communities []Community
	LocalPref   uint32
	// AggregateV4 and AggregateV6 are the announced prefix lengths. All addresses they cover are in pools announced
	// by BGP, or they are 32 and 128.
	AggregateV4, AggregateV6 int
	// RestartTime is how long peers keep the routes while the agent is down; 0: not at all. Whole seconds up to 4095 s.
	RestartTime time.Duration
	// LongLivedRestartTime is how long peers keep the routes after RestartTime, with the lowest preference (RFC 9494);
	// 0: not at all. Whole seconds of 24 bits; RestartTime is not 0.
	LongLivedRestartTime time.Duration
	// MaxRoutes is how many prefixes are announced at most.
	MaxRoutes int
	// GracefulShutdown is how long routes have the lowest preference before they are withdrawn because of a drain or
	// the end of the agent, up to 10 s; 0: they are withdrawn at once.
	GracefulShutdown time.Duration
	Weighted         lb.Weighted
}

// Attributes are path attributes of routes, in addition to those of BGP. The zero value changes nothing.
type Attributes struct {
	Communities []Community
	LocalPref   *uint32 // nil: that of BGP
	MED         *uint32 // nil: none
}

// Peer is one BGP neighbour.
type Peer struct {
	// One of the three: the address, which may have a zone when it is link-local; the interface on which the only
	// router is the peer; addresses from which peers connect to this node.
	Address         netip.Addr
	Interface       string
	ListenRange     netip.Prefix
	ASN             uint32 // 0 with External
	External        bool   // any AS but the own
	LocalASN        uint32 // towards the peer; 0: that of BGP
	Passive         bool
	ConnectRetry    time.Duration // between two attempts to connect, in the mean
	Keepalive       time.Duration // between two KEEPALIVEs; 0: a third of the hold time
	Port            uint16
	Password        Secret        // TCP MD5 (RFC 2385), 1 to 80 bytes; zero: none configured
	HoldTime        time.Duration // 0, or whole seconds from 3 to 65535 (RFC 4271 §4.2)
	MaxReceived     uint32        // of routes before it is reported; 0: any number
	Multihop        int           // TTL of a multihop eBGP session; 0: directly connected
	TTLSecurity     bool          // RFC 5082; never together with Multihop
	Source          netip.Addr    // of the family of Address; zero: the kernel chooses
	Device          string        // interface or VRF of the session; empty: any interface that is in no VRF
	GracefulRestart bool
	BFD             BFD
	NodeSelector    string   // label selector; "": every node
	Pools           []string // names of the pools whose routes it gets; empty: all routes
	Attributes      Attributes
	Prepend         int // how often ASN is in front of the AS path once more; 0 for a peer of the same AS
}

// BFD configures the detection of failures of a peer (RFC 5880). The zero value is off.
type BFD struct {
	Interval   time.Duration // between packets in both directions
	Multiplier int           // packets that may be missing, 1 to 255
	Multihop   bool          // RFC 5883
	MinTTL     int           // with Multihop: the lowest TTL of received packets; 0: any
}

// L2 configures announcements by ARP and NDP.
type L2 struct {
	Interfaces []string // empty: the uplinks
	// Members are the other machines with the same addresses. Empty: there are none, or they are the nodes of the
	// cluster.
	Members []netip.Addr
	Port    uint16 // membership, UDP and TCP
	// Secrets encrypt the messages of members: the first one those that are sent; all are accepted. Each has 16 to 80
	// bytes. Empty: the tunnel keys do.
	Secrets []Secret
	// Unencrypted: there is no key, and messages are not authenticated.
	Unencrypted bool
	// ProbeOwn is how often the link is asked whether another host has an address of this node; 0: never.
	ProbeOwn time.Duration
	// SpreadLocal: the node that has an address spreads over all nodes with endpoints under the policy Local, too.
	SpreadLocal bool
}

// Pool is a set of addresses that may be assigned to services and announced.
type Pool struct {
	Name   string
	Ranges []lb.AddrRange // disjoint, within one pool and between pools
	// Announce are the announcers, all of them on; empty: all that are on.
	Announce        []lb.AnnouncerKind
	AutoAssign      bool // assign its addresses to services that do not request a pool
	AvoidBuggyIPs   bool // skip addresses that end in .0 or .255
	Namespaces      []string
	ServiceSelector string
	Priority        int  // lower first
	ExternalIPs     bool // Services may have its addresses as spec.externalIPs
	ShareAcross     bool // Services of all namespaces may share its addresses by key
	// Grace is how long an address of a Service of the cluster is served after it was removed from the pool.
	Grace      time.Duration
	Attributes Attributes
	Prepend    int // as that of a Peer, for peers that have none
	// AggregateV4 and AggregateV6 are the announced prefix lengths, of prefixes that are in the pool; 0: those of BGP.
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

// Service is a service of the file: everything an lb.Service needs.
type Service struct {
	Name string
	// Addresses are those in the file; empty: one is allocated per family that both Pool and Backends have.
	Addresses []netip.Addr
	// Pool is the requested pool; "": Addresses are requested.
	Pool       string
	Ports      []lb.Port // in the order of the file
	Backends   []lb.Backend
	Algorithm  lb.Algorithm
	Method     lb.Method
	Encap      lb.Encap
	SNAT       bool // with MethodNAT; false: backends receive the address of the client
	Affinity   time.Duration
	Allow      []netip.Prefix
	MinHealthy int
	OnAllDown  string // OnAllDownWithdraw or OnAllDownKeep: of an address without healthy backends
	Check      lb.CheckSpec
	// Announce is that of the pool that has the addresses; empty: all announcers that are on.
	Announce []lb.AnnouncerKind
	// AddressPerNode: the service is to have an address of each family for each member of L2, on different members.
	AddressPerNode bool
}

// AnnouncesL2 reports whether addresses with these announcers are announced by L2; empty: all that are on.
func (c *Config) AnnouncesL2(by []lb.AnnouncerKind) bool {
	return c.L2 != nil && (len(by) == 0 || slices.Contains(by, lb.AnnounceL2))
}

// Values of Kubernetes.Proxy.
const (
	ProxyAuto      = "auto"
	ProxyKubeProxy = "kube-proxy" // it serves health check node ports and ClusterIPs
	ProxyReplace   = "replace"    // the agent serves them
)

// Kubernetes configures the source of services from a cluster.
type Kubernetes struct {
	Kubeconfig        string // "": the credentials of the pod
	LoadBalancerClass string // "": Services that name no class
	Allocate          bool
	Proxy             string    // ProxyAuto, ProxyKubeProxy or ProxyReplace
	Forward           lb.Method // to pods on other nodes: MethodTunnel or MethodNAT
	// ExcludeNodes are states of this node, beside those of Kubernetes itself, in which it announces nothing.
	ExcludeNodes []string
	// IgnoreExcludeLabel: nodes announce although they have the label that excludes them from external load balancers.
	IgnoreExcludeLabel bool
	HealthAddresses    []netip.Prefix // where health check node ports and 10256 listen; empty: on all
	// MaxEndpointsPerService bounds the pairs of endpoint and port that a Service gets; at least 1.
	MaxEndpointsPerService int
}

// The states of a node that may be excluded.
const (
	NodeNotReady      = "not-ready"
	NodeUnschedulable = "unschedulable" // cordoned
)

// Probe configures the probes of health check node ports and of the service proxy.
type Probe struct {
	Interval, Timeout time.Duration // Timeout ≤ Interval
	Fall, Rise        int
	ProxyHealthz      string // URL
	// OnAllDown says what to do when the service proxies of all nodes fail: OnAllDownKeep or OnAllDownWithdraw.
	OnAllDown string
	Hold      time.Duration // how long a withdrawn address stays withdrawn at least
}

// Values of Probe.OnAllDown and of on_all_down of a service.
const (
	OnAllDownKeep     = "keep"
	OnAllDownWithdraw = "withdraw"
)

// Admin has the addresses of the API of the agent.
type Admin struct {
	Socket string   // absolute path, at most 107 bytes
	Hosts  []string // names of the node in requests to Listen
	Listen string   // "address:port", read-only; "": nowhere
	// Token is what requests to Listen must bear; not set: none.
	Token Secret
	Allow []netip.Prefix // sources that Listen accepts; empty: all
	// TLSCert and TLSKey are files in PEM for Listen; "": no TLS. They were a pair when the configuration was read.
	TLSCert, TLSKey string
}

// Log configures the log of the agent.
type Log struct {
	Level  slog.Level
	Format string // "text" or "json"
}

// Default is the configuration of an empty file.
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

// Load reads and parses a file, and validates it by further rules. The error is an Errors with all errors of the file.
func Load(file string, rules ...Rule) (*Config, error) {
	text, err := Read(file)
	if err != nil {
		return nil, err
	}
	return Parse(file, text, rules...)
}

// maxSize is the size of the largest file that is read, in bytes: an endless one would use all memory.
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

// Parse parses text. file is used in errors; relative names of secret files are relative to its directory, and
// nothing else is read. The error is an Errors with all errors of the text.
func Parse(file string, text []byte, rules ...Rule) (*Config, error) {
	return newDecoder(file).decode(text, rules...)
}

// ParseElsewhere is Parse of the configuration of another machine: secret files that this one lacks are no errors.
func ParseElsewhere(file string, text []byte, rules ...Rule) (*Config, error) {
	d := newDecoder(file)
	d.elsewhere = true
	return d.decode(text, rules...)
}
