package l2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ndp"
)

// port is one interface.
type port struct {
	a    *Announcer
	name string
	log  *slog.Logger

	mu     sync.Mutex // guards all below; taken after Announcer.mu
	open   *sockets   // nil while the interface cannot be used
	groups map[netip.Addr]int
}

// sockets are what an interface is served through while it is up and stays the same.
type sockets struct {
	ifi *net.Interface
	arp *arp.Client
	ndp *ndpSocket // nil when the interface has no IPv6
}

// retryAfter is how long an interface that failed is left alone, unless it changes.
const retryAfter = time.Second

func (p *port) run(ctx context.Context, changed <-chan struct{}) {
	said := ""
	for ctx.Err() == nil {
		err := p.serve(ctx, changed)
		if ctx.Err() != nil {
			return
		}
		if err != nil && err.Error() != said { // once per cause, not per try
			said = err.Error()
			p.log.Warn("interface not served", "err", err)
		} else if err == nil {
			said = ""
			continue // it changed: begin again at once
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-time.After(retryAfter):
		}
	}
}

// serve answers until the interface changes, fails, or ctx ends. It returns nil when it only has to begin again.
func (p *port) serve(ctx context.Context, changed <-chan struct{}) error {
	s, err := openSockets(p.name, p.log)
	if err != nil {
		return err
	}
	p.begin(s)
	p.log.Info("interface served", "mac", s.ifi.HardwareAddr.String(), "ndp", s.ndp != nil)
	failed := make(chan error, 2)
	var readers sync.WaitGroup
	readers.Go(func() { failed <- p.readARP(s) })
	if s.ndp != nil {
		readers.Go(func() { failed <- p.readNDP(s) })
	}
	p.a.tell(ctx, []*port{p}, p.a.all())
	defer func() {
		p.mu.Lock()
		p.open, p.groups = nil, nil
		p.mu.Unlock()
		s.close()
		readers.Wait()
	}()
	again := time.NewTicker(retryAfter)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-again.C:
			if s.ndp != nil {
				again.Stop()
			} else if n, err := openNDP(s.ifi); err == nil { // its link-local address was not there yet
				n.close()
				return nil
			}
		case <-changed:
			now, err := net.InterfaceByName(p.name)
			if err != nil {
				return fmt.Errorf("look again: %w", err)
			}
			if now.Index != s.ifi.Index || now.Flags&net.FlagUp == 0 || !bytes.Equal(now.HardwareAddr, s.ifi.HardwareAddr) {
				return nil
			}
		}
	}
}

func openSockets(name string, log *slog.Logger) (*sockets, error) {
	ifi, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	if ifi.Flags&net.FlagUp == 0 {
		return nil, errors.New("interface is down")
	}
	if len(ifi.HardwareAddr) != 6 {
		return nil, errors.New("interface is no Ethernet")
	}
	c, err := arp.Dial(ifi)
	if err != nil {
		return nil, fmt.Errorf("open ARP: %w", err)
	}
	n, err := openNDP(ifi)
	if err != nil {
		log.Info("no NDP on interface", "err", err)
	}
	return &sockets{ifi, c, n}, nil
}

func (s *sockets) close() {
	s.arp.Close()
	if s.ndp != nil {
		s.ndp.close()
	}
}

// begin makes s the way to send, and listens for what is owned.
func (p *port) begin(s *sockets) {
	p.a.mu.RLock()
	defer p.a.mu.RUnlock()
	p.mu.Lock()
	p.open, p.groups = s, map[netip.Addr]int{}
	p.mu.Unlock()
	for vip := range p.a.owned {
		p.join(vip)
	}
}

// join listens to the solicited-node group of an IPv6 VIP (RFC 4861 §7.2.1); several VIPs may share one.
func (p *port) join(vip netip.Addr) { p.member(vip, 1) }

// leave undoes join.
func (p *port) leave(vip netip.Addr) { p.member(vip, -1) }

func (p *port) member(vip netip.Addr, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !vip.Is6() || p.open == nil || p.open.ndp == nil {
		return
	}
	group, err := ndp.SolicitedNodeMulticast(vip)
	if err != nil {
		return // only for addresses that Set refuses
	}
	was := p.groups[group]
	p.groups[group] += n
	switch {
	case was == 0 && n > 0:
		err = p.open.ndp.conn.JoinGroup(group)
	case was == 1 && n < 0:
		err = p.open.ndp.conn.LeaveGroup(group)
	}
	if err != nil {
		p.log.Warn("multicast group not changed", "vip", vip, "err", err)
	}
}

// gratuitous tells everybody on the interface that the VIPs are here, as far as they are still owned.
func (p *port) gratuitous(vips []netip.Addr) {
	p.mu.Lock()
	s := p.open
	p.mu.Unlock()
	if s == nil {
		return
	}
	for _, vip := range vips {
		sent, err := p.a.answer(vip, func() error {
			if vip.Is4() {
				return gratuitousARP(s, vip)
			}
			if s.ndp == nil {
				return nil
			}
			return s.ndp.advertise(vip, allNodes, false)
		})
		if err != nil {
			p.log.Debug("take-over not told", "vip", vip, "err", err)
		} else if sent {
			p.a.metrics.gratuitous.WithLabelValues(p.name).Inc()
		}
	}
}
