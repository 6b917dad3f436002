package lb

// Order is data: what a consumer may be told about a VIP follows from what is wanted and from what the other consumer
// surely or maybe holds. "Announced only while served, torn down only when no longer announced" is these two pure
// functions and nothing else; there is no first step and no second, so a crash, a slow peer or a reload in the middle
// is no special case. The obvious rule, to trust what was last confirmed, is wrong while a call is under way.

// Known is what the engine knows of one VIP at one consumer.
type Known struct {
	Done bool // held when the consumer last said so
	Busy bool // a call is under way …
	Goal bool // … after which it will be held, if the call succeeds
}

// Surely reports whether the consumer holds the VIP whatever comes of the call under way.
func (k Known) Surely() bool { return k.Done && (!k.Busy || k.Goal) }

// Maybe reports whether the consumer may hold the VIP, now or after the call under way.
func (k Known) Maybe() bool { return k.Done || (k.Busy && k.Goal) }

// Serve reports whether the datapath must serve a VIP: when it is wanted, and as long as it may still attract traffic.
func Serve(want bool, announce Known) bool { return want || announce.Maybe() }

// Announce reports whether a VIP may be announced: wanted, healthy and surely served.
func Announce(want, healthy bool, datapath Known) bool { return want && healthy && datapath.Surely() }
