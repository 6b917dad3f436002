package l2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mdlayher/ndp"
)

// responder replies to requests on one interface.
type responder struct {
	a    *Announcer
	name string // in the configuration
	// changed has room for one value: the interface may have changed.
	changed chan struct{}
	log     *slog.Logger
	sys     system
	// index is the interface index, or 0 if it was not found yet. Only run's goroutine uses it.
	index int
	// heard is when a frame from another host was last received, in nanoseconds since the Unix epoch.
	heard atomic.Int64

	mu     sync.Mutex // guards all below; taken after Announcer.mu
	open   *sockets   // nil while the interface is unusable
	groups map[netip.Addr]int
	// replies names an earlier interface in the list that replies in the same segment, or is "".
	replies string
	segment question // last probe that finds other interfaces in this segment
}

// sockets are an interface's sockets while it is up and unchanged.
type sockets struct {
	ifi *net.Interface
	arp arpConn
	ndp *ndpSocket // nil if the interface has no IPv6
}

// retryAfter is the time until a failed interface is tried again, unless it changes earlier.
const retryAfter = time.Second

func (r *responder) run(ctx context.Context) {
	logged := ""
	for ctx.Err() == nil {
		err := r.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil && err.Error() != logged { // once per cause
			logged = err.Error()
			r.log.Warn("not replying on interface", "err", err)
		} else if err == nil {
			logged = ""
			continue // the interface changed: reopen immediately
		}
		select {
		case <-ctx.Done():
		case <-r.changed:
		case <-time.After(retryAfter):
		}
	}
}

// serve replies until ctx ends or the interface changes or fails. It returns nil if the sockets must be reopened.
func (r *responder) serve(ctx context.Context) error {
	s, err := r.openSockets()
	if err != nil {
		return err
	}
	if !r.a.o.Claim && !slices.ContainsFunc(r.a.responders, (*responder).isOpen) {
		r.a.reclaim()
	}
	r.use(s)
	r.log.Info("replying on interface", "mac", s.ifi.HardwareAddr.String(), "ndp", s.ndp != nil)
	failed := make(chan error, 2)
	var readers sync.WaitGroup
	readers.Go(func() { failed <- r.readARP(s) })
	if s.ndp != nil {
		readers.Go(func() { failed <- r.readNDP(s) })
	}
	r.a.announce(ctx, []*responder{r}, r.a.all())
	defer func() {
		r.mu.Lock()
		r.open, r.groups = nil, nil
		r.mu.Unlock()
		r.a.linksChanged()
		s.close()
		readers.Wait()
	}()
	retry := time.NewTicker(retryAfter)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-retry.C:
			if err := r.forwards(s.ifi.Index); err != nil {
				return err
			}
			if s.ndp != nil {
				continue
			}
			if n, err := r.sys.openNDP(s.ifi); err == nil { // there was no link-local address before
				n.close()
				return nil
			}
		case <-r.changed:
			now, err := r.find()
			if err != nil {
				return fmt.Errorf("look up the interface again: %w", err)
			}
			if !usable(s.ifi, now) {
				return nil
			}
		}
	}
}

// find returns the interface, even if it was renamed after it was found by name.
func (r *responder) find() (*net.Interface, error) {
	ifi, err := r.sys.byName(r.name)
	if err != nil && r.index != 0 {
		if renamed, err := r.sys.byIndex(r.index); err == nil {
			return renamed, nil
		}
	}
	if err == nil {
		r.index = ifi.Index
	}
	return ifi, err
}

func (r *responder) openSockets() (*sockets, error) {
	ifi, err := r.find()
	if err != nil {
		return nil, err
	}
	switch {
	case ifi.Flags&net.FlagUp == 0:
		return nil, errors.New("interface is down")
	case ifi.Flags&up != up:
		return nil, errors.New("interface has no carrier")
	}
	if len(ifi.HardwareAddr) != 6 {
		return nil, errors.New("interface is not Ethernet")
	}
	if err := r.forwards(ifi.Index); err != nil {
		return nil, err
	}
	c, err := r.sys.openARP(ifi)
	if err != nil {
		return nil, fmt.Errorf("open ARP: %w", err)
	}
	n, err := r.sys.openNDP(ifi)
	if err != nil {
		r.log.Info("no NDP on interface", "err", err)
	}
	return &sockets{ifi, c, n}, nil
}

// forwards returns an error if packets that arrive on the interface are not forwarded.
func (r *responder) forwards(index int) error {
	if r.a.o.Forwards == nil {
		return nil
	}
	ifi, err := r.sys.byIndex(index)
	if err != nil {
		return fmt.Errorf("look up the interface again: %w", err)
	}
	if !r.a.o.Forwards(ifi.Name) {
		return errors.New("packets that arrive here are not forwarded because the programs are not active")
	}
	return nil
}

func (s *sockets) close() {
	s.arp.Close()
	if s.ndp != nil {
		s.ndp.close()
	}
}

// use makes s the current sockets and joins the VIPs' multicast groups.
func (r *responder) use(s *sockets) {
	r.a.mu.RLock()
	defer r.a.mu.RUnlock()
	r.mu.Lock()
	r.open, r.groups, r.replies = s, map[netip.Addr]int{}, ""
	r.mu.Unlock()
	for _, vip := range r.a.allOf() {
		r.join(vip)
	}
	r.a.linksChanged()
}

// join joins the solicited-node multicast group of an IPv6 VIP (RFC 4861 §7.2.1). Several VIPs may share a group.
func (r *responder) join(vip netip.Addr) { r.addToGroup(vip, 1) }

func (r *responder) leave(vip netip.Addr) { r.addToGroup(vip, -1) }

// addToGroup adds n to the number of VIPs in the group of vip.
func (r *responder) addToGroup(vip netip.Addr, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !vip.Is6() || r.open == nil || r.open.ndp == nil {
		return
	}
	group, err := ndp.SolicitedNodeMulticast(vip)
	if err != nil {
		return // fails only for addresses that Set rejects
	}
	was := r.groups[group]
	r.groups[group] += n
	switch {
	case was == 0 && n > 0:
		err = r.open.ndp.conn.joinGroup(group)
	case was == 1 && n < 0:
		err = r.open.ndp.conn.leaveGroup(group)
	}
	if err != nil {
		r.log.Warn("multicast group not changed", "vip", vip, "err", err)
	}
}

// opened returns the sockets, or nil while the interface is unusable.
func (r *responder) opened() *sockets {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.open
}

// gratuitous sends gratuitous frames for the VIPs that are still owned.
func (r *responder) gratuitous(ctx context.Context, vips []netip.Addr, pace *bucket) {
	s := r.opened()
	if s == nil || r.isSilent() {
		return
	}
	for _, vip := range vips {
		pace.wait(ctx)
		sent, err := r.a.claimOwned(vip, func() error {
			if vip.Is4() {
				return gratuitousARP(s, vip)
			}
			if s.ndp == nil {
				return nil
			}
			return s.ndp.advertise(vip, allNodes, multicastMAC(allNodes), false)
		})
		if err != nil {
			r.log.Debug("gratuitous frame not sent", "vip", vip, "err", err)
		} else if sent {
			r.a.metrics.gratuitous.WithLabelValues(r.name).Inc()
		}
	}
}
