package lb

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
)

// Part names the code that handles one kind of external object. It is a label of steelyard_panics_total.
type Part string

// The parts. A refused object of the first group keeps its previous state until it changes; objects of the second group
// are handled only once.
const (
	PartService   Part = "service" // a Service of the cluster or of the file, with its EndpointSlices
	PartSlice     Part = "endpointslice"
	PartNode      Part = "node"
	PartConfigMap Part = "configmap"
	PartSecret    Part = "secret"
	PartPlan      Part = "plan"      // of a service
	PartTable     Part = "table"     // of a frontend
	PartAddresses Part = "addresses" // assigned to a Service by the allocator

	PartStatus  Part = "status" // of a service
	PartObject  Part = "object" // of the cluster, on arrival
	PartPeer    Part = "peer"   // a message from a BGP peer
	PartBFD     Part = "bfd"
	PartFrame   Part = "frame"   // of ARP and NDP
	PartMember  Part = "member"  // a message from a member
	PartNetlink Part = "netlink" // a notification from the kernel
	PartHTTP    Part = "http"    // a request
	PartProbe   Part = "probe"   // of a server
)

// Parts that report objects refused without a panic.
const (
	PartRoom      Part = "room"      // for a service in the kernel's tables
	PartEndpoints Part = "endpoints" // of a Service that has too many
	PartEndpoint  Part = "endpoint"  // of a Service, with an address that cannot be an endpoint's
	PartPort      Part = "port"      // of a Service, which this node uses itself
)

// Parts lists the parts that count panics.
var Parts = []Part{
	PartService, PartSlice, PartNode, PartConfigMap, PartSecret, PartPlan, PartTable, PartAddresses,
	PartStatus, PartObject, PartPeer, PartBFD, PartFrame, PartMember, PartNetlink, PartHTTP, PartProbe,
}

// keeps reports whether the part's objects persist: a refused one keeps its previous state until it is handled again.
func (p Part) keeps() bool { return slices.Index(Parts, p) < slices.Index(Parts, PartStatus) }

// Boundary surrounds the handling of each external object, so that a panic loses only that object. The panic is
// counted, logged with its stack, and reported as a trouble in the status. Code inside a boundary must hold no lock
// that others need and change only what belongs to the object: it builds values that are activated afterwards. The
// methods may be called from any goroutine. On a nil Boundary, Do does not recover and Report does nothing.
type Boundary struct {
	Log *slog.Logger
	// Changed is called when an object's trouble begins or changes. It must not block. It may be nil.
	Changed func(Trouble)
	// Before is called inside the boundary, before the object is handled. Tests use it to panic; in an agent it is nil.
	Before func(Part, string)

	some     atomic.Bool // troubles may have entries
	mu       sync.Mutex  // guards all below
	panics   map[Part]uint64
	troubles map[object]Trouble
}

type object struct {
	part Part
	name string
}

// Trouble says why an object is not handled normally.
type Trouble struct {
	Part   Part
	Object string
	Reason string
	at     time.Time // when it last occurred
}

// troublesMax bounds the number of troubles kept. troubleFor is how long the trouble of an object that does not persist
// is shown.
const (
	troublesMax = 1000
	troubleFor  = 10 * time.Minute
)

// Do calls f, which handles an object, and reports whether f returned.
func (b *Boundary) Do(part Part, name string, f func()) (ok bool) {
	if b == nil {
		f()
		return true
	}
	defer func() {
		if ok {
			return
		}
		reason := recover()
		if reason == nil { // runtime.Goexit
			return
		}
		b.mu.Lock()
		if b.panics == nil {
			b.panics = map[Part]uint64{}
		}
		b.panics[part]++
		b.mu.Unlock()
		b.report(part, name, cut(fmt.Sprintf("panic: %v", reason)), true)
	}()
	if b.Before != nil {
		b.Before(part, name)
	}
	f()
	if part.keeps() {
		b.Report(part, name, "")
	}
	return true
}

// Report sets the trouble of an object. An empty reason clears it.
func (b *Boundary) Report(part Part, name, reason string) {
	if b != nil && (reason != "" || b.some.Load()) {
		b.report(part, name, reason, false)
	}
}

// cut makes external text printable and truncates it to 200 characters.
func cut(text string) string {
	return fmt.Sprintf("%.200s", strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '.'
		}
		return r
	}, text))
}

func (b *Boundary) report(part Part, name, reason string, panicked bool) {
	name = cut(name)
	key, t := object{part, name}, Trouble{part, name, reason, time.Now()}
	b.mu.Lock()
	if b.troubles == nil {
		b.troubles = map[object]Trouble{}
	}
	was, known := b.troubles[key]
	switch {
	case reason == "":
		delete(b.troubles, key)
		b.some.Store(len(b.troubles) > 0)
	case known || len(b.troubles) < troublesMax:
		b.troubles[key] = t
		b.some.Store(true)
	}
	b.mu.Unlock()
	switch {
	case reason == was.Reason:
		return
	case reason == "":
		b.Log.Info("object handled again", "part", part, "object", name)
		return
	case panicked:
		b.Log.Error("object refused", "part", part, "object", name, "reason", reason, "stack", string(debug.Stack()))
	default:
		b.Log.Error("object degraded", "part", part, "object", name, "reason", reason)
	}
	if b.Changed != nil {
		b.Changed(t)
	}
}

// Panics returns the number of panics in each part.
func (b *Boundary) Panics() map[Part]uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.panics)
}

// shownTroubles is how many objects of each part the status names.
const shownTroubles = 3

// Troubles returns the texts for the status.
func (b *Boundary) Troubles() (list []string) {
	b.mu.Lock()
	var all []Trouble
	for key, t := range b.troubles {
		if !key.part.keeps() && time.Since(t.at) > troubleFor {
			delete(b.troubles, key)
			continue
		}
		all = append(all, t)
	}
	b.mu.Unlock()
	slices.SortFunc(all, func(x, y Trouble) int {
		return cmp.Or(cmp.Compare(x.Part, y.Part), cmp.Compare(x.Object, y.Object))
	})
	of := map[Part]int{}
	for _, t := range all {
		if of[t.Part]++; of[t.Part] <= shownTroubles {
			list = append(list, fmt.Sprintf("%s %s: %s", t.Part, t.Object, t.Reason))
		}
	}
	for _, part := range slices.Sorted(maps.Keys(of)) {
		if more := of[part] - shownTroubles; more > 0 {
			list = append(list, fmt.Sprintf("%s: %d more", part, more))
		}
	}
	return list
}
