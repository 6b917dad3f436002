// Package routeradv finds the router at the other end of a link through its router advertisements (RFC 4861). It also
// advertises this node to the router, as unnumbered BGP peers expect.
//
// In: interfaces (SetInterfaces). Out: the link-local address of the router on each (Options.Found). Its own
// advertisements have a router lifetime of 0 and no prefixes, so hosts do not use this node as a router.
//
// Messages must have a hop limit of 255, so only hosts on the link can forge them. If several hosts advertise
// themselves, each is tried in turn until a session is established (candidates.go).
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
	// interval is the mean and minInterval the minimum time between advertisements (RFC 4861, section 6.2.6).
	// initialInterval separates the first ones (section 6.2.4: at most 16 s).
	interval, minInterval, initialInterval = 10 * time.Second, 3 * time.Second, 3 * time.Second
	initialCount                           = 3
	// poll is the time between checks of the interface, and retry the time after a failure.
	poll, retry = time.Second, time.Second
)

var allNodes, allRouters = netip.MustParseAddr("ff02::1"), netip.MustParseAddr("ff02::2")

// Options configures a Finder.
type Options struct {
	// Found is called when the router on an interface is found or changes. The interface is the address's zone.
	Found func(iface string, router netip.Addr)
	// InUse reports whether a router works and must not be replaced. Nil means that none works.
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

type link struct {
	name string
	o    *Options
	stop context.CancelFunc

	mu         sync.Mutex // guards the following fields
	problem    string     // why messages are neither sent nor received
	candidates candidates
}

func New(o Options) *Finder { return &Finder{o: o, links: map[string]*link{}} }

// Run finds routers until ctx ends.
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

// Problem says why no router can be found on an interface, or returns "".
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

// fail records a problem and logs it once. "" clears it.
func (l *link) fail(problem string) {
	l.mu.Lock()
	news := problem != l.problem
	l.problem = problem
	l.mu.Unlock()
	if news && problem != "" {
		l.o.Log.Warn("no router advertisements", "interface", l.name, "err", problem)
	}
}

// errChanged means that the interface or its address was replaced.
var errChanged = errors.New("the interface has changed")

// exchange sends and receives messages until ctx ends or an operation fails.
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

// send advertises this node periodically, and whenever a router solicits or is new.
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
				due = time.Now() // the new router may not know this node yet
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

type reader interface {
	ReadFrom() (ndp.Message, *ipv6.ControlMessage, netip.Addr, error)
}

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

// hear records an advertisement. It reports whether the router is new and may not know this node yet.
func (l *link) hear(from netip.Addr) bool {
	added, first, full := l.add(from)
	if added {
		level := slog.LevelInfo
		if full { // anybody can send any number
			level = slog.LevelDebug
		}
		l.o.Log.Log(context.Background(), level, "router found", "interface", l.name, "router", from)
	}
	if first {
		l.o.Found(l.name, from)
	}
	return added
}

// add makes a router a candidate. added says that it is new, first that it is now the link's router, and full that
// there were already maxCandidates.
func (l *link) add(router netip.Addr) (added, first, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	known := l.candidates.all[router] != nil
	full = len(l.candidates.all) == maxCandidates
	first = l.candidates.hear(router, time.Now())
	return !known && l.candidates.all[router] != nil, first, full
}

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
