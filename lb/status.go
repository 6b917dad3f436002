package lb

import (
	"fmt"
	"net/netip"
	"time"
)

// Status is what the engine knows at one moment: the source of the API, the metrics and the command line. The field
// names are a contract (DESIGN §7).
type Status struct {
	Services []ServiceStatus `json:"services"`
	Backends []BackendStatus `json:"backends"`
	Routes   []RouteStatus   `json:"routes"`
	// Settled is false from the start of the agent until every source is complete and every check has answered once.
	Settled bool `json:"settled"`
}

// ServiceStatus is one frontend of a service.
type ServiceStatus struct {
	Service   string          `json:"service"`
	Address   netip.Addr      `json:"address"`
	Port      uint16          `json:"port"`
	Protocol  Protocol        `json:"protocol"`
	Policy    Policy          `json:"policy"`
	Forward   Method          `json:"forward"`
	Algorithm Algorithm       `json:"algorithm"`
	Backends  []BackendStatus `json:"backends"`
	// State is healthy when the address has enough backends to be announced.
	State     State  `json:"state"`
	Announced bool   `json:"announced"`
	Reason    string `json:"reason,omitempty"` // why not announced
}

// BackendStatus is one backend of a service.
type BackendStatus struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port"`
	Weight  int        `json:"weight"`
	State   State      `json:"state"`
	Reason  string     `json:"reason,omitempty"` // what its check last found
	Since   time.Time  `json:"since,omitzero"`   // when it entered the state
}

// RouteStatus is one VIP.
type RouteStatus struct {
	Address   netip.Addr      `json:"address"`
	Services  []string        `json:"services"`
	By        []AnnouncerKind `json:"by,omitempty"` // empty: every announcer that is on
	Announced bool            `json:"announced"`
	Reason    string          `json:"reason,omitempty"` // why not
	Since     time.Time       `json:"since,omitzero"`   // when announced or withdrawn
}

// PeerStatus is one BGP neighbour.
type PeerStatus struct {
	Peer      netip.Addr `json:"peer"`
	ASN       uint32     `json:"asn"`
	State     string     `json:"state"`  // idle, connect, active, opensent, openconfirm, established
	Routes    int        `json:"routes"` // announced to it
	Since     time.Time  `json:"since,omitzero"`
	LastError string     `json:"reason,omitempty"` // why it is not established
}

func countReason(healthy, of, need int) string {
	return fmt.Sprintf("%d of %d backends healthy, min_healthy is %d", healthy, of, need)
}
