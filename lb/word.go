package lb

import (
	"fmt"
	"slices"
	"strings"
)

// The enumerations of the model. Each value is the same string in Go, TOML, JSON and logs. UnmarshalText rejects other
// values with an error that lists the allowed ones.
type (
	// Method is how packets of a service reach a backend (docs/forwarding.md).
	Method string
	// Algorithm is how new flows are spread over the backends of a service.
	Algorithm string
	// Policy determines the backends for traffic from outside a Kubernetes cluster.
	Policy string
	// CheckType is the protocol of a health check.
	CheckType string
	// AnnouncerKind is the protocol that makes an address reachable.
	AnnouncerKind string
	// Encap is the encapsulation used by MethodTunnel.
	Encap string
)

const (
	MethodNAT    Method = "nat"    // rewrite source and destination; replies return through the balancer
	MethodDSR    Method = "dsr"    // rewrite the destination MAC only; the server replies to the client directly
	MethodTunnel Method = "tunnel" // encapsulate; the server replies to the client directly
	MethodLocal  Method = "local"  // rewrite the destination; the backend runs on this node

	AlgorithmMaglev           Algorithm = "maglev"
	AlgorithmRoundRobin       Algorithm = "round-robin"
	AlgorithmRandom           Algorithm = "random"
	AlgorithmSourceHash       Algorithm = "source-hash"
	AlgorithmLeastConnections Algorithm = "least-connections"

	PolicyCluster Policy = "Cluster"
	PolicyLocal   Policy = "Local"

	CheckTCP      CheckType = "tcp"
	CheckHTTP     CheckType = "http"
	CheckHTTPS    CheckType = "https"
	CheckHTTP2    CheckType = "http2"
	CheckUDP      CheckType = "udp"
	CheckDNS      CheckType = "dns"
	CheckGRPC     CheckType = "grpc"
	CheckExec     CheckType = "exec"
	CheckNone     CheckType = "none"
	CheckNodePort CheckType = "health-check-node-port"
	CheckEcho     CheckType = "echo" // for nodes, with a VIP; not allowed in configurations

	AnnounceBGP AnnouncerKind = "bgp"
	AnnounceL2  AnnouncerKind = "l2"

	EncapIPIP Encap = "ipip"
	EncapGUE  Encap = "gue"
)

// The allowed values, in the order used in errors and documents.
var (
	// Methods are allowed in configurations; MethodLocal follows from a backend's node.
	Methods    = []Method{MethodNAT, MethodDSR, MethodTunnel}
	Algorithms = []Algorithm{
		AlgorithmMaglev, AlgorithmRoundRobin, AlgorithmRandom, AlgorithmSourceHash, AlgorithmLeastConnections,
	}
	Policies   = []Policy{PolicyCluster, PolicyLocal}
	CheckTypes = []CheckType{
		CheckTCP, CheckHTTP, CheckHTTPS, CheckHTTP2, CheckUDP, CheckDNS, CheckGRPC, CheckExec, CheckNone,
		CheckNodePort,
	}
	AnnouncerKinds = []AnnouncerKind{AnnounceBGP, AnnounceL2}
	Encaps         = []Encap{EncapIPIP, EncapGUE}
)

func (w *Method) UnmarshalText(b []byte) error { return unmarshalWord(w, "method", Methods, b) }
func (w *Algorithm) UnmarshalText(b []byte) error {
	return unmarshalWord(w, "algorithm", Algorithms, b)
}
func (w *Policy) UnmarshalText(b []byte) error { return unmarshalWord(w, "policy", Policies, b) }
func (w *CheckType) UnmarshalText(b []byte) error {
	return unmarshalWord(w, "check type", CheckTypes, b)
}
func (w *AnnouncerKind) UnmarshalText(b []byte) error {
	return unmarshalWord(w, "announcer", AnnouncerKinds, b)
}
func (w *Encap) UnmarshalText(b []byte) error { return unmarshalWord(w, "encapsulation", Encaps, b) }

func unmarshalWord[T ~string](dst *T, what string, allowed []T, b []byte) error {
	if !slices.Contains(allowed, T(b)) {
		return fmt.Errorf("unknown %s %q; allowed: %s", what, b, Words(allowed))
	}
	*dst = T(b)
	return nil
}

// Words joins the values of an enumeration with ", ", for error messages.
func Words[T ~string](words []T) string {
	s := make([]string, len(words))
	for i, w := range words {
		s[i] = string(w)
	}
	return strings.Join(s, ", ")
}

// Protocol is an IP protocol number (IANA "Assigned Internet Protocol Numbers") that a frontend can have.
type Protocol uint8

const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// Protocols are all protocols a frontend can have.
var Protocols = []Protocol{TCP, UDP, SCTP}

var protocolNames = map[Protocol]string{TCP: "tcp", UDP: "udp", SCTP: "sctp"}

func (p Protocol) String() string {
	if s, ok := protocolNames[p]; ok {
		return s
	}
	return fmt.Sprintf("protocol-%d", uint8(p))
}

func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText accepts "tcp", "udp" and "sctp".
func (p *Protocol) UnmarshalText(b []byte) error {
	for _, known := range Protocols {
		if known.String() == string(b) {
			*p = known
			return nil
		}
	}
	return fmt.Errorf("unknown protocol %q; allowed: tcp, udp, sctp", b)
}

// State is the state of a backend. The zero value means that its check has had no result yet.
type State uint8

const (
	StateUnknown State = iota
	StateHealthy
	StateUnhealthy
	StateDraining
)

var stateNames = [...]string{"unknown", "healthy", "unhealthy", "draining"}

func (s State) String() string               { return stateNames[s] }
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is the inverse of MarshalText, for programs that read the API.
func (s *State) UnmarshalText(b []byte) error {
	i := slices.Index(stateNames[:], string(b))
	if i < 0 {
		return fmt.Errorf("unknown state %q; allowed: %s", b, strings.Join(stateNames[:], ", "))
	}
	*s = State(i)
	return nil
}
