// Package routeradv finds the router at the other end of a link through its router advertisements (RFC 4861), and
// announces this node to it in the same way, as routers with unnumbered BGP peers expect.
//
// In: interfaces (SetInterfaces). Out: the link-local address of the router on each (Options.Found). The advertisements
// it sends have a router lifetime of 0 and no prefixes, so that no host uses this node as a router.
//
// Messages must have a hop limit of 255, so only hosts on the link can forge them. If several hosts advertise
// themselves, they take turns until one is in use (candidates.go).
package routeradv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"

	"github.com/steelyard-lb/steelyard/lb"
)

const (
	// interval is the mean time between two advertisements, minInterval the least (RFC 4861, section 6.2.6); the first
	// ones follow each other after initialInterval (section 6.2.4: at most 16 s).
	interval, minInterval, initialInterval = 10 * time.Second, 3 * time.Second, 3 * time.Second
	initialCount                           = 3
	// poll is the interval between checks of the interface, retry the time until a failed one is tried again.
	poll, retry = time.Second, time.Second
)

var allNodes, allRouters = netip.MustParseAddr("ff02::1"), netip.MustParseAddr("ff02::2")

// Options configures a Finder.
type Options struct {
	// Found is called when the router on an interface is found or changes. The address has the interface as zone.
	Found func(iface string, router netip.Addr)
	// InUse reports whether a router works and must not be replaced. If it is nil, none does.
	InUse func(router netip.Addr) bool
	// Boundary wraps the handling of each message. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
}

// Finder looks for routers. Its methods may be called from any goroutine.
type Finder struct {
	o Options

	mu      sync.Mutex // guards the following fields
	running context.Context
	links   map[string]*link
	wg      sync.WaitGroup
}

// link is an interface.
type link struct {
	name string
	o    *Options
	stop context.CancelFunc // nil if not started

	mu         sync.Mutex // guards the following fields
	problem    string     // why nothing is sent and received
	candidates candidates
}

// New returns a Finder without interfaces.
func New(o Options) *Finder { return &Finder{o: o, links: map[string]*link{}} }

// Run works until ctx ends.
func (f *Finder) Run(ctx context.Context) {
	f.mu.Lock()
	f.running = ctx
	for _, l := range f.links {
		f.start(l)
	}
	f.mu.Unlock()
	<-ctx.Done()
	f.mu.Lock()
	f.running = nil
	f.mu.Unlock()
	f.wg.Wait()
}

// start begins the goroutine of an interface. f.mu is held.
func (f *Finder) start(l *link) {
	ctx, cancel := context.WithCancel(f.running)
	l.stop = cancel
	f.wg.Go(func() { l.run(ctx) })
}

// SetInterfaces replaces the interfaces. They need not exist.
func (f *Finder) SetInterfaces(names []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, l := range f.links {
		if !slices.Contains(names, name) {
			if l.stop != nil {
				l.stop()
			}
			delete(f.links, name)
		}
	}
	for _, name := range names {
		if f.links[name] == nil {
			f.links[name] = &link{name: name, o: &f.o}
			if f.running != nil {
				f.start(f.links[name])
			}
		}
	}
}

// Problem says why no router is found on an interface.
func (f *Finder) Problem(name string) string {
	f.mu.Lock()
	l := f.links[name]
	f.mu.Unlock()
	if l == nil {
		return ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.problem != "" {
		return l.problem
	}
	return "no router advertisement received on " + name
}

func (l *link) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := l.exchange(ctx)
		if ctx.Err() != nil {
			return
		}
		l.fail(err.Error())
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// fail records a problem and logs it once. "" means that there is none.
func (l *link) fail(problem string) {
	l.mu.Lock()
	news := problem != l.problem
	l.problem = problem
	l.mu.Unlock()
	if news && problem != "" {
		l.o.Log.Warn("no router advertisements", "interface", l.name, "err", problem)
	}
}

// errChanged means that the interface was replaced or has another address.
var errChanged = errors.New("the interface has changed")

// exchange sends and receives until ctx ends or something fails.
func (l *link) exchange(ctx context.Context) error {
	ifi, err := net.InterfaceByName(l.name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", l.name, err)
	}
	conn, self, err := ndp.Listen(ifi, ndp.LinkLocal)
	if err != nil {
		return fmt.Errorf("interface %s: %w", l.name, err)
	}
	defer conn.Close()
	var filter ipv6.ICMPFilter
	filter.SetAll(true)
	filter.Accept(ipv6.ICMPTypeRouterAdvertisement)
	filter.Accept(ipv6.ICMPTypeRouterSolicitation)
	err = errors.Join(conn.SetICMPFilter(&filter), conn.SetControlMessage(ipv6.FlagHopLimit|ipv6.FlagInterface, true),
		conn.JoinGroup(allNodes), conn.JoinGroup(allRouters))
	if err != nil {
		return fmt.Errorf("interface %s: %w", l.name, err)
	}
	l.fail("")
	asked := make(chan struct{}, 1)
	failed := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { failed <- l.receive(conn, ifi.Index, asked) })
	err = l.send(ctx, conn, ifi, self, asked, failed)
	conn.Close()
	wg.Wait()
	return err
}

// send advertises this node regularly, and when a router asks or is new.
func (l *link) send(
	ctx context.Context, conn *ndp.Conn, ifi *net.Interface, self netip.Addr,
	asked <-chan struct{}, failed <-chan error,
) error {
	if err := conn.WriteTo(&ndp.RouterSolicitation{}, nil, allRouters); err != nil {
		return fmt.Errorf("solicit routers on %s: %w", l.name, err)
	}
	tick := time.NewTicker(poll)
	defer tick.Stop()
	var last, due time.Time
	for n := 0; ; {
		now := time.Now()
		if !now.Before(due) {
			err := conn.WriteTo(&ndp.RouterAdvertisement{CurrentHopLimit: 64, Options: []ndp.Option{
				&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: ifi.HardwareAddr},
			}}, nil, allNodes)
			if err != nil {
				return fmt.Errorf("advertise on %s: %w", l.name, err)
			}
			last, due = now, now.Add(interval*3/4+rand.N(interval/2))
			if n++; n < initialCount {
				due = now.Add(initialInterval)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-failed:
			return err
		case <-asked:
			if at := last.Add(minInterval); at.Before(due) {
				due = at
			}
		case <-tick.C:
			if !has(ifi, self) {
				return errChanged
			}
			if l.turn() {
				due = time.Now() // it may not know this node yet
			}
		}
	}
}

// has reports whether the interface still exists with this address.
func has(ifi *net.Interface, self netip.Addr) bool {
	now, err := net.InterfaceByName(ifi.Name)
	if err != nil || now.Index != ifi.Index {
		return false
	}
	addrs, err := now.Addrs()
	return err == nil && slices.ContainsFunc(addrs, func(a net.Addr) bool {
		p, err := netip.ParsePrefix(a.String())
		return err == nil && p.Addr() == self.WithZone("")
	})
}

// reader is what receive needs of an *ndp.Conn.
type reader interface {
	ReadFrom() (ndp.Message, *ipv6.ControlMessage, netip.Addr, error)
}

// receive reads until conn is closed.
func (l *link) receive(conn reader, index int, asked chan<- struct{}) error {
	for {
		var m ndp.Message
		var cm *ipv6.ControlMessage
		var from netip.Addr
		var err error
		if !l.o.Boundary.Do(lb.PartFrame, l.name, func() { m, cm, from, err = conn.ReadFrom() }) {
			continue
		}
		if err != nil {
			if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) {
				return err
			}
			return fmt.Errorf("receive on %s: %w", l.name, err)
		}
		if cm == nil || cm.HopLimit != ndp.HopLimit || cm.IfIndex != index {
			continue
		}
		answer := false
		l.o.Boundary.Do(lb.PartFrame, l.name, func() {
			switch m.(type) {
			case *ndp.RouterSolicitation:
				answer = true
			case *ndp.RouterAdvertisement:
				answer = from.IsLinkLocalUnicast() && l.hear(from)
			}
		})
		if answer {
			select {
			case asked <- struct{}{}:
			default:
			}
		}
	}
}

// hear records an advertisement. It reports whether the router is new: it may not know this node yet.
func (l *link) hear(from netip.Addr) bool {
	added, first, full := l.add(from)
	if added {
		level := slog.LevelInfo
		if full { // anyone can send any number of them
			level = slog.LevelDebug
		}
		l.o.Log.Log(context.Background(), level, "router found", "interface", l.name, "router", from)
	}
	if first {
		l.o.Found(l.name, from)
	}
	return added
}

// add makes a router a candidate. It reports whether it is new, whether it is the router from now on, and whether
// another candidate was evicted for it.
func (l *link) add(router netip.Addr) (added, first, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	known := l.candidates.all[router] != nil
	full = len(l.candidates.all) == maxCandidates
	first = l.candidates.hear(router, time.Now())
	return !known && l.candidates.all[router] != nil, first, full
}

// turn makes another candidate the router if its turn has come.
func (l *link) turn() bool {
	l.mu.Lock()
	router := l.candidates.router
	l.mu.Unlock()
	inUse := router.IsValid() && l.o.InUse != nil && l.o.InUse(router)
	l.mu.Lock()
	next := l.candidates.next(inUse, time.Now())
	l.mu.Unlock()
	if !next.IsValid() {
		return false
	}
	l.o.Log.Debug("trying another router", "interface", l.name, "router", next, "before", router)
	l.o.Found(l.name, next)
	return true
}
