package inside

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/datapath/netwatch"
	"github.com/steelyard-lb/steelyard/lb"
)

// Options configure a service proxy.
type Options struct {
	Pins      string          // directory in a bpffs for the maps, which stay when the agent ends
	Uplinks   func() []string // interfaces to other machines, even if they are veths, like those of pods
	NodePorts []netip.Prefix  // the node's addresses at which node ports answer; empty for all
	// NoSocketLB makes programs translate the packets of the node's TCP connections to ClusterIPs, as for UDP, instead
	// of the address at connect(2).
	NoSocketLB bool
	// Other returns which other service proxy's rules are in the kernel, or "". Its connections go on. It may be nil.
	Other func() (string, error)
	// Drain leaves new connections to another service proxy. Open ones go on; when the last has ended, Run removes
	// everything from the kernel.
	Drain bool
	Log   *slog.Logger
}

// Inside is the service proxy of this network namespace.
type Inside struct {
	o         Options
	objects   *prog.Objects
	constants map[string]any // of the programs
	device    *device
	devices   *devices
	flows     flows

	mu       sync.Mutex // guards the following
	services *services
	// earlier has the addresses of an earlier agent's services, until Apply has all. Their routes stay until then.
	earlier map[netip.Addr]uint32
	own     own
	kinds   map[netip.Addr]uint32 // as written
	v4, v6  []netip.Prefix        // ranges as written
	ranges  prog.Ranges           // the same, encoded
	older   older
	drained bool // the kernel has nothing of this proxy any more
	routed  []netip.Prefix
	faults  map[string]error // why some clients do not reach services
	gone    []gone           // whose UDP flows are still to be removed
	left    map[leftPort]*left
	endSoon bool                     // a pod of left has ended since endLeft ran
	silent  map[prog.FlowKey]silence // used by endLeft alone
}

// Open loads and attaches the programs, or takes over from an earlier agent, whose services stay until Apply replaces
// them.
func Open(o Options) (_ *Inside, err error) {
	i := &Inside{
		o: o, kinds: map[netip.Addr]uint32{}, earlier: map[netip.Addr]uint32{}, faults: map[string]error{},
		left: map[leftPort]*left{},
	}
	first := !Serves(o.Pins)
	defer func() {
		if err == nil {
			return
		}
		err = fmt.Errorf("open the service proxy: %w", err)
		i.Close()
		if first {
			err = errors.Join(err, Cleanup(o.Pins, o.Log))
		} else if Serves(o.Pins) {
			err = fmt.Errorf("%w; the programs of an earlier agent still serve, with its endpoints", err)
		}
	}()
	if i.device, err = openDevice(o.Log); err != nil {
		return nil, err
	}
	if i.constants, err = constants(i.device.Index()); err != nil {
		return nil, err
	}
	if i.objects, err = load(o.Pins, i.constants, o.NoSocketLB); err != nil {
		return nil, err
	}
	if i.services, err = newServices(i.objects); err != nil {
		return nil, err
	}
	if err := i.readEarlier(); err != nil {
		return nil, err
	}
	i.flows.table, i.flows.direct, i.flows.outside = i.objects.Flows, i.objects.Direct, i.objects.Outside
	if err := i.refresh(true); err != nil {
		return nil, err
	}
	if err := i.device.attach(i.objects.Send); err != nil {
		return nil, err
	}
	i.repairSockets()
	if err := i.followOlder(); err != nil && first {
		return nil, err
	} else if err != nil { // Run tries again
		o.Log.Error("connections of another service proxy not followed", "err", err)
	}
	i.devices = newDevices(deviceOptions{
		in: i.objects.Arrive, out: i.objects.Leave, devices: i.objects.Devices, uplinks: o.Uplinks, pins: o.Pins,
		log: o.Log, changed: i.fit, begin: func() (func(), error) { return lock(o.Pins), nil },
	})
	if !first {
		i.publish(i.objects.Arrive, i.objects.Leave)
	}
	if err := i.devices.Sync(); err != nil { // Run tries again
		o.Log.Error("programs of the service proxy not attached", "err", err)
	}
	if first { // a watcher need not attach to all interfaces at the same time
		i.publish(i.objects.Arrive, i.objects.Leave)
	}
	if err := i.sweep(); err != nil && !errors.Is(err, errDrained) {
		return nil, err
	}
	return i, nil
}

// publish gives Watch these programs, or none if the agent drains.
func (i *Inside) publish(in, out *ebpf.Program) {
	var err error
	if i.o.Drain {
		err = withdraw(i.o.Pins)
	} else {
		err = publish(in, out, i.o.Pins)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.setFault("pods that start while the agent is not running", err)
}

// Serves reports whether an agent is or was the service proxy whose maps are in a directory, so that its programs still
// serve.
func Serves(pins string) bool {
	_, err := os.Stat(filepath.Join(pins, "sy_in_services"))
	return err == nil
}

// fit gives the routed device the MTU of the other devices.
func (i *Inside) fit() {
	if mtu := i.devices.MTU(); mtu != 0 {
		if err := i.device.SetMTU(mtu); err != nil {
			i.o.Log.Error("MTU not set", "err", err)
		}
	}
}

// Apply puts the rules of the Services in changed; a Service without rules is removed. If all is true, changed has all
// Services, and others are removed. UDP flows end if their endpoint serves their port no more; TCP connections go on.
func (i *Inside) Apply(changed map[string][]lb.NodeRule, all bool) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.drained {
		return nil
	}
	left, err := i.services.apply(changed, all)
	if all && err == nil && i.earlier != nil {
		for a := range i.earlier {
			i.services.touched[a] = true
		}
		i.earlier = nil
		var unseen []gone
		unseen, err = i.prune()
		left = append(left, unseen...)
	}
	if len(i.services.touched) > 0 {
		err = errors.Join(err, i.putTouched())
	}
	isTCP := func(g gone) bool { return g.key.Proto == uint8(lb.TCP) }
	i.leave(slices.DeleteFunc(slices.Clone(left), func(g gone) bool { return !isTCP(g) }))
	left = slices.DeleteFunc(left, isTCP)
	// A packet that has read the old list may still open a flow, so maintain removes them once more.
	i.gone = append(i.gone, left...)
	i.older.check = i.older.held && (i.older.check || len(left) > 0 || all)
	return errors.Join(err, i.flows.leave(left))
}

// setFault stores and logs why some clients do not reach services, or nil if they do. The caller holds i.mu.
func (i *Inside) setFault(what string, err error) {
	if err != nil && (i.faults[what] == nil || i.faults[what].Error() != err.Error()) {
		i.o.Log.Warn("not complete", "what", what, "err", err)
	}
	if i.faults[what] = err; err == nil {
		delete(i.faults, what)
	}
}

// repairSockets attaches the programs for system calls unless they are, and then verifies that they run.
func (i *Inside) repairSockets() {
	const what = "the node's own sockets"
	changed, err := attachSockets(i.objects, i.o.Pins)
	i.mu.Lock()
	defer i.mu.Unlock()
	if err == nil && !i.o.Drain && (changed || i.faults[what] != nil) {
		err = i.verifySockets()
	}
	i.setFault(what, err)
}

// Periods of Run.
const (
	sweepEvery  = 10 * time.Second
	olderEvery  = 5 * time.Second // a large table of connection tracking takes a second to read
	retireEvery = time.Second
	checkEvery  = 30 * time.Second
)

// errDrained ends what Run runs.
var errDrained = errors.New("drained")

// Run follows this node's interfaces and addresses, and removes ended flows, until ctx ends.
func (i *Inside) Run(ctx context.Context) error {
	err := i.follow(ctx)
	if !errors.Is(err, errDrained) {
		return err
	}
	i.o.Log.Info("all connections through the service proxy have ended; the kernel has no more of it")
	i.mu.Lock()
	i.drained, err = true, Cleanup(i.o.Pins, i.o.Log)
	i.setFault("not removed from the kernel", err)
	i.mu.Unlock()
	<-ctx.Done()
	return nil
}

func (i *Inside) follow(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return i.devices.Run(ctx) })
	changed := make(chan struct{}, 1)
	g.Go(func() error {
		netwatch.Watch(ctx, func(*netwatch.Message, error) {
			select {
			case changed <- struct{}{}:
			default:
			}
		}, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
		return nil
	})
	g.Go(func() error { return i.maintain(ctx, changed) })
	return g.Wait()
}

func (i *Inside) maintain(ctx context.Context, changed <-chan struct{}) error {
	sweep, retire, check := time.NewTicker(sweepEvery), time.NewTicker(retireEvery), time.NewTicker(checkEvery)
	defer sweep.Stop()
	defer retire.Stop()
	older := time.NewTicker(olderEvery)
	defer older.Stop()
	defer check.Stop()
	for {
		var err error
		what := "addresses not followed"
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			err = i.refresh(false)
		case <-check.C:
			i.repairSockets()
			err = errors.Join(i.refresh(true), i.followOlder())
		case <-sweep.C:
			if what, err = "ended flows not removed", i.sweep(); errors.Is(err, errDrained) {
				return err
			}
		case <-older.C:
			what, err = "connections of another service proxy not followed", i.checkOlder()
		case now := <-retire.C:
			what, err = "replaced endpoints not removed", i.retire(now)
		}
		if err != nil {
			i.o.Log.Error(what, "err", err)
		}
	}
}

// sweep removes ended flows, and resets those that nothing answers. It returns errDrained if no flow is left that this
// service proxy has to end.
func (i *Inside) sweep() error {
	entries, err := i.flows.sweep()
	if err != nil {
		return err
	}
	if entries == 0 && i.o.Drain {
		return errDrained
	}
	return i.endLeft()
}

// retire removes replaced lists, and once more the flows of endpoints that have left. It resets the connections of pods
// that have ended.
func (i *Inside) retire(now time.Time) error {
	i.mu.Lock()
	err, left, soon := i.services.removeRetired(now), i.gone, i.endSoon
	i.gone = nil
	i.mu.Unlock()
	if soon {
		err = errors.Join(err, i.endLeft())
	}
	if failed := i.flows.leave(left); failed != nil {
		i.mu.Lock()
		i.gone = append(i.gone, left...)
		i.mu.Unlock()
		err = errors.Join(err, failed)
	}
	return err
}

// Findings returns why some clients may not reach services.
func (i *Inside) Findings() []string {
	all := i.devices.Findings()
	i.mu.Lock()
	defer i.mu.Unlock()
	for what, err := range i.faults {
		all = append(all, fmt.Sprintf("%s: %v", what, err))
	}
	slices.Sort(all)
	return all
}

// Close closes the descriptors. The kernel continues to serve.
func (i *Inside) Close() error {
	if i.objects != nil {
		i.objects.Close()
	}
	return nil
}

// Cleanup removes what agents left in the kernel: programs, the routed device, and the maps with their flows. No agent
// may run.
func Cleanup(pins string, log *slog.Logger) error {
	uplinks := func() []string { return nil }
	err := withdraw(pins) // first, so that Watch attaches nothing that is then left
	if Serves(pins) {     // otherwise the kernel may not even have nftables
		err = errors.Join(err, releaseNAT())
	}
	return errors.Join(err,
		newDevices(deviceOptions{pins: pins, uplinks: uplinks, log: log}).detach(),
		(&device{log: log}).Remove(), os.RemoveAll(pins))
}
