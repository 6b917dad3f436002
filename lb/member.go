package lb

import (
	"net/netip"
	"time"
)

// MemberStatus is another member of [l2], or another node of the cluster, as this node sees it.
type MemberStatus struct {
	Member netip.Addr `json:"member"`
	Name   string     `json:"name"`  // its address until it has reported its name
	State  string     `json:"state"` // up, down, or deaf: its messages arrive, but it does not respond
	Since  time.Time  `json:"since"` // of up, and of down or deaf
	// Ahead is by how many seconds its clock is ahead of this node's, or a negative number. Its error is at most
	// Within, the time of a round trip. Without Within, the clock is not known.
	Ahead  float64 `json:"clock_ahead_seconds,omitempty"`
	Within float64 `json:"clock_within_seconds,omitempty"`
}

// States of members.
const (
	MemberUp   = "up"
	MemberDown = "down"
	MemberDeaf = "deaf"
)
