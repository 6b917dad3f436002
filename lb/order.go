package lb

// The order of updates is not a sequence of steps, so a crash, a slow peer or a reload needs no special case. Instead,
// a VIP's state at one consumer depends on the wanted state and on its certain or possible state at the other. Two pure
// functions, Serve and Announce, implement "announced only while served, removed only when no longer announced". A
// simpler rule that relies on the last confirmation would be wrong while a call is in flight.

// Known is the state of one VIP at one consumer.
type Known struct {
	Done bool // the consumer held the VIP when its last call returned
	Busy bool // a call is in flight …
	Goal bool // … after which the consumer holds the VIP, if the call succeeds
}

// Surely reports whether the consumer holds the VIP regardless of the outcome of the call in flight.
func (k Known) Surely() bool { return k.Done && (!k.Busy || k.Goal) }

// Maybe reports whether the consumer may hold the VIP, now or after the call in flight.
func (k Known) Maybe() bool { return k.Done || (k.Busy && k.Goal) }

// Serve reports whether the datapath must serve a VIP: while it is wanted, and while it may be announced.
func Serve(want bool, announce Known) bool { return want || announce.Maybe() }

// Announce reports whether a VIP may be announced: it is wanted, healthy and surely served.
func Announce(want, healthy bool, datapath Known) bool { return want && healthy && datapath.Surely() }
