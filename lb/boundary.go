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

// Part is what handles a kind of objects that come from outside: the label of steelyard_panics_total.
type Part string

// The parts. Of the first ones an object stays as it was until it changes; the others handle each object once.
const (
	PartService   Part = "service" // a Service of the cluster or of the file, with its EndpointSlices
	PartSlice     Part = "endpointslice"
	PartNode      Part = "node"
	PartConfigMap Part = "configmap"
	PartSecret    Part = "secret"
	PartPlan      Part = "plan"      // of a service
	PartTable     Part = "table"     // of a frontend
	PartAddresses Part = "addresses" // that the allocator gives a Service

	PartStatus  Part = "status" // of a service
	PartObject  Part = "object" // of the cluster, as it arrives
	PartPeer    Part = "peer"   // a message of a BGP peer
	PartBFD     Part = "bfd"
	PartFrame   Part = "frame"   // of ARP and NDP
	PartMember  Part = "member"  // a message of a member
	PartNetlink Part = "netlink" // a notification of the kernel
	PartHTTP    Part = "http"    // a request
	PartProbe   Part = "probe"   // of a server
)

// Parts of which objects are reported that are refused without a panic.
const (
	PartRoom      Part = "room"      // of a service in the tables of the kernel
	PartEndpoints Part = "endpoints" // of a Service: it has too many
)

// Parts are the parts that count panics.
var Parts = []Part{
	PartService, PartSlice, PartNode, PartConfigMap, PartSecret, PartPlan, PartTable, PartAddresses,
	PartStatus, PartObject, PartPeer, PartBFD, PartFrame, PartMember, PartNetlink, PartHTTP, PartProbe,
}

// keeps reports whether objects of the part last, so that one is as it was until it is handled again.
func (p Part) keeps() bool { return slices.Index(Parts, p) < slices.Index(Parts, PartStatus) }

// Boundary is around the handling of each object that comes from outside. A panic in it loses that object only: it is
// counted, logged with its stack, and a trouble in the status. What is handled inside of a boundary holds no lock that
// others need and changes only what belongs to the object: values are built aside, and put in force after it. Its
// methods may be called from any goroutine; those of nil recover nothing and report nothing.
type Boundary struct {
	Log *slog.Logger
	// Changed is called when an object has a trouble, or has another one. It must not block. It may be nil.
	Changed func(Trouble)
	// Before is called inside of the boundary, before the object is handled. Tests panic in it; an agent has none.
	Before func(Part, string)

	some     atomic.Bool // there is a trouble of an object that lasts
	mu       sync.Mutex  // guards all below
	panics   map[Part]uint64
	troubles map[object]Trouble
}

type object struct {
	part Part
	name string
}

// Trouble is why an object is not handled as it should be.
type Trouble struct {
	Part   Part
	Object string
	Reason string
	at     time.Time // the last time
}

// troublesMax bounds the troubles that are kept, and troubleFor how long one of an object that does not last is shown.
const (
	troublesMax = 1000
	troubleFor  = 10 * time.Minute
)

// Do calls f, which handles an object, and reports whether it has returned.
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

// Report sets the trouble of an object, "": it has none.
func (b *Boundary) Report(part Part, name, reason string) {
	if b != nil && (reason != "" || b.some.Load()) {
		b.report(part, name, reason, false)
	}
}

// cut makes a text that others may have written printable, and bounds it.
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

// Panics returns how many panics each part has had.
func (b *Boundary) Panics() map[Part]uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.panics)
}

// shownTroubles is how many objects of a part the status names.
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
