package l2

import (
	"context"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/netwatch"
	"github.com/steelyard-lb/steelyard/lb"
)

// watchLinks notifies responders that their interfaces may have changed, until ctx ends.
func (a *Announcer) watchLinks(ctx context.Context) {
	logged := ""
	netwatch.Watch(ctx, func(m *netwatch.Message, lost error) {
		if lost != nil {
			a.metrics.overruns.Inc()
			if lost.Error() != logged {
				logged = lost.Error()
				a.o.Log.Warn("link updates lost; checking every interface again", "reason", logged)
			}
		}
		a.o.Boundary.Do(lb.PartNetlink, "l2", func() { a.linkChanged(m) })
	}, unix.RTNLGRP_LINK)
}

// linkChanged notifies the responders whose interface a notification is about. That is the interface with the
// configured name, or the open one, which may have been renamed. nil, for lost ones, is about every interface.
func (a *Announcer) linkChanged(m *netwatch.Message) {
	var changed *netlink.LinkAttrs
	if m != nil {
		link, err := netlink.LinkDeserialize(nil, m.Data)
		if err != nil {
			return
		}
		changed = link.Attrs()
	}
	for _, r := range a.responders {
		s := r.opened()
		if changed == nil || changed.Name == r.name || s != nil && s.ifi.Index == changed.Index {
			signal(r.changed)
		}
	}
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
