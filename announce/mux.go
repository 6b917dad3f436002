package announce

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/steelyard-lb/steelyard/lb"
)

// Mux hands each announcement to the announcers that it names; one that names none goes to all.
//
// An announcement that names only announcers that are off is announced by nobody. That is no error here: it is what
// the configuration says, and what reads the configuration reports it.
type Mux struct {
	kinds      []lb.AnnouncerKind // sorted
	announcers map[lb.AnnouncerKind]lb.Announcer
}

// NewMux returns one Announcer made of those that are on. The map may be empty; it is not kept.
func NewMux(announcers map[lb.AnnouncerKind]lb.Announcer) *Mux {
	return &Mux{kinds: slices.Sorted(maps.Keys(announcers)), announcers: maps.Clone(announcers)}
}

// Set tells every announcer its part, all at the same time, and returns when each has answered. The errors are joined,
// each with the name of its announcer: one that fails keeps no other from its work.
func (m *Mux) Set(ctx context.Context, announcements []lb.Announcement) error {
	errs := make([]error, len(m.kinds))
	var calls sync.WaitGroup
	for i, kind := range m.kinds {
		calls.Go(func() {
			if err := m.announcers[kind].Set(ctx, only(announcements, kind)); err != nil {
				errs[i] = fmt.Errorf("announce by %s: %w", kind, err)
			}
		})
	}
	calls.Wait()
	return errors.Join(errs...)
}

// only returns the announcements that are for kind, in their order.
func only(announcements []lb.Announcement, kind lb.AnnouncerKind) []lb.Announcement {
	own := make([]lb.Announcement, 0, len(announcements))
	for _, a := range announcements {
		if len(a.By) == 0 || slices.Contains(a.By, kind) {
			own = append(own, a)
		}
	}
	return own
}
