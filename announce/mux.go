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

// Mux passes each announcement to the announcers in its By field, or to all if By is empty.
//
// If all of an announcement's announcers are off, it is not announced. Mux does not report this as an error; package
// config does.
type Mux struct {
	kinds      []lb.AnnouncerKind // sorted
	announcers map[lb.AnnouncerKind]lb.Announcer
}

// NewMux returns a Mux of the announcers that are on. The map may be empty; it is copied.
func NewMux(announcers map[lb.AnnouncerKind]lb.Announcer) *Mux {
	return &Mux{kinds: slices.Sorted(maps.Keys(announcers)), announcers: maps.Clone(announcers)}
}

// Set concurrently calls every announcer's Set with its part, and waits for all of them. A failure of one does not
// affect the others. Set joins the errors, each with the announcer's name. The result is of type lb.VIPErrors if all
// errors are.
func (m *Mux) Set(ctx context.Context, announcements []lb.Announcement) error {
	errs := make([]error, len(m.kinds))
	var calls sync.WaitGroup
	for i, kind := range m.kinds {
		calls.Go(func() {
			errs[i] = m.announcers[kind].Set(ctx, filter(announcements, kind))
		})
	}
	calls.Wait()
	vips := lb.VIPErrors{}
	for i, err := range errs {
		each, ok := err.(lb.VIPErrors)
		for vip, err := range each {
			vips.Add(vip, fmt.Errorf("by %s: %w", m.kinds[i], err))
		}
		if ok {
			errs[i] = nil
		} else if err != nil {
			errs[i] = fmt.Errorf("announce by %s: %w", m.kinds[i], err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return errors.Join(err, vips.OrNil())
	}
	return vips.OrNil()
}

func filter(announcements []lb.Announcement, kind lb.AnnouncerKind) []lb.Announcement {
	own := make([]lb.Announcement, 0, len(announcements))
	for _, a := range announcements {
		if len(a.By) == 0 || slices.Contains(a.By, kind) {
			own = append(own, a)
		}
	}
	return own
}
