package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sync/errgroup"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// Datapath controls forwarding in the kernel: it updates the maps and removes flows that have ended.
type Datapath struct {
	o        Options
	log      *slog.Logger
	objects  *bpf.Objects
	chunks   *table.Chunks
	pins     *pin.Pins
	uplinks  *attachments
	services *table.Services
	tunnels  *table.Tunnels
	probes   *probes
	gc       *flowGC
	verifier *verifier
	repairs  *repairs
	overruns atomic.Uint64 // how often the kernel dropped notifications about the network
	reasons  []string
	actions  []string
	commits  []string
}

// Open loads the programs, or takes over from an earlier agent, and attaches them. If it fails, a first start leaves
// nothing behind, and a takeover leaves the earlier agent's maps, links and programs in force.
func Open(o Options) (_ *Datapath, err error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("open the datapath: %w", err)
	}
	if err := CheckKernel(); err != nil {
		return nil, err
	}
	if err := checkCapabilities(); err != nil {
		return nil, err
	}
	d := &Datapath{o: o, log: o.Log, repairs: newRepairs(o.Log)}
	d.verifier = newVerifier(d)
	if err := d.readNames(); err != nil {
		return nil, err
	}
	if d.pins, err = pin.Open(o.PinPath); err != nil {
		return nil, err
	}
	t := &pin.Transaction{}
	t.OnFailure(d.pins.Rollback)
	defer func() {
		if err != nil {
			err = errors.Join(err, t.Rollback(), d.Close())
		}
	}()
	if err := d.open(t); err != nil {
		return nil, err
	}
	if err := d.pins.Publish(); err != nil {
		return nil, err
	}
	d.uplinks.open = nil
	if err := errors.Join(t.Commit(), d.uplinks.prune(), d.services.SyncFilter()); err != nil {
		return nil, err
	}
	if !o.Delivers { // otherwise SetTunnelSources follows soon; until then the sources of an earlier agent remain
		if err := errors.Join(d.tunnels.Set(nil), d.uplinks.sysctls.StopForwarding()); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// readNames reads the names of the C enumerators from the embedded object.
func (d *Datapath) readNames() (err error) {
	if d.reasons, err = bpf.ReasonNames(); err != nil {
		return err
	}
	if d.actions, err = bpf.EnumNames("action", "ACTION_"); err != nil {
		return err
	}
	d.commits, err = bpf.EnumNames("commit", "COMMIT_")
	return err
}

// open loads the programs and puts them in force; t undoes each step.
func (d *Datapath) open(t *pin.Transaction) (err error) {
	objects, inner, err := load(d.o, d.pins.Dir)
	if err != nil {
		return err
	}
	d.objects = objects
	for _, f := range slices.Concat(d.keptSize(), d.pinsWritable()) {
		d.log.Warn(f.Text)
	}
	if d.chunks, err = table.OpenChunks(objects, inner, d.pins); err != nil {
		return err
	}
	if err := addPorts(objects, d.o.SNATPorts); err != nil {
		return err
	}
	if err := d.o.inject("load"); err != nil {
		return err
	}
	filter, err := table.OpenFilter(objects.SyAddrFilter, bpf.HashKeys(d.o.HashSeed))
	if err != nil {
		return err
	}
	if d.services, err = table.Open(d.objects, d.chunks, filter, d.log); err != nil {
		return err
	}
	d.services.SetMembers(d.o.TunnelSources)
	if d.o.TunnelKeys != nil {
		if err := d.SetTunnelKeys(*d.o.TunnelKeys); err != nil {
			return err
		}
	}
	d.tunnels = table.NewTunnels(d.objects, filter, d.o.TunnelSources)
	if err := d.tunnels.Refresh(); err != nil {
		return err
	}
	attendance, err := openAttendance(d.objects, d.pins.First())
	if err != nil {
		return err
	}
	d.gc = newFlowGC(d.objects, d.services, attendance, d.o.Timeouts, d.log)
	sys, err := sysctl.Open(d.o.StateDir, d.log)
	if err != nil {
		return err
	}
	t.OnFailure(sys.Checkpoint())
	if err := sys.Reserve(d.o.ports()); err != nil {
		// In an unprivileged container sysctls are read-only. The ports are above those that Linux assigns by default.
		d.log.Warn("snat_ports not reserved", "err", err,
			"fix", "add them to the sysctl net.ipv4.ip_local_reserved_ports", "ports", d.o.SNATPorts)
	}
	d.uplinks = &attachments{
		o: d.o, objects: d.objects, pins: d.pins, sysctls: sys, repairs: d.repairs, open: t,
		status: map[string]InterfaceStatus{}, index: map[string]int{}, ids: programIDs{}, foreign: map[string]foreign{},
		notFollowed: map[string]string{}, needed: map[string]time.Time{}, held: map[string]link.Link{},
	}
	d.probes = &probes{objects: d.objects, uplinks: d.uplinks, marks: map[probeKey]uint32{}}
	if err := chain(d.objects, t); err != nil {
		return err
	}
	return d.uplinks.attachAll(d.needed(new(route.Cache), d.services.Interfaces(nil)))
}

// Held implements lb.Datapath.
func (d *Datapath) Held() ([]lb.Frontend, error) { return d.services.Held(), nil }

// Apply implements lb.Datapath. Flows to a backend that is down end at once: their packets are treated as packets of
// unknown flows. Run removes these flows, and the flows of removed frontends, within seconds.
func (d *Datapath) Apply(_ context.Context, delta lb.Delta) map[lb.Frontend]error {
	failed := map[lb.Frontend]error{}
	for _, f := range delta.Delete {
		id, err := d.services.Remove(f)
		if err != nil {
			failed[f] = fmt.Errorf("remove frontend %s: %w", f, err)
			continue
		}
		d.gc.endFrontend(id)
	}
	plans, slots := d.tables(delta.Put, failed)
	updates := d.services.Put(plans, delta.Later, slots)
	for _, u := range updates {
		if errors.Is(u.Err, lb.ErrRefused) {
			failed[u.Plan.Frontend] = u.Err
			continue
		}
		if u.Err != nil {
			failed[u.Plan.Frontend] = fmt.Errorf("put frontend %s: %w", u.Plan.Frontend, u.Err)
			continue
		}
		if u.Ended > 0 {
			d.gc.wake()
		}
		if u.MethodChanged {
			d.gc.endOtherMethods(u.Frontend.ID, bpf.Method(u.Value.Method))
		}
	}
	d.verifier.applied(updates, delta.Delete)
	return failed
}

// tables computes the tables of plans before anything is locked or written. It returns the plans that have a table, and
// adds the others to failed.
func (d *Datapath) tables(plans []*lb.FrontendPlan, failed map[lb.Frontend]error) ([]*lb.FrontendPlan, table.Tables) {
	done, t := make([]*lb.FrontendPlan, 0, len(plans)), make(table.Tables, len(plans))
	for _, p := range plans {
		var slots []uint16
		if d.o.Boundary.Do(lb.PartTable, p.Service+" "+p.Frontend.String(), func() { slots = p.Table() }) {
			done, t[p] = append(done, p), slots
		} else {
			failed[p.Frontend] = fmt.Errorf("%w: its table cannot be computed", lb.ErrRefused)
		}
	}
	return done, t
}

// Run removes flows that have ended, follows changes of interfaces, addresses and routes, and releases unneeded
// interfaces, until ctx ends.
func (d *Datapath) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.gc.run(ctx) })
	g.Go(func() error { return d.services.Run(ctx) })
	g.Go(func() error { return d.watch(ctx) })
	g.Go(func() error { return d.releaseUnneeded(ctx) })
	return g.Wait()
}

// Close closes the file descriptors of this process. The kernel continues forwarding.
func (d *Datapath) Close() error {
	var err error
	if d.services != nil {
		err = d.services.Close()
	}
	if d.uplinks != nil {
		err = errors.Join(err, d.uplinks.closeLinks())
	}
	if d.objects != nil {
		err = errors.Join(err, d.objects.Close())
	}
	if d.chunks != nil {
		d.chunks.Close()
	}
	d.verifier.close()
	return errors.Join(err, d.pins.Close())
}

// Interfaces returns the attachment of each interface, sorted by name.
func (d *Datapath) Interfaces() []InterfaceStatus {
	d.uplinks.mu.Lock()
	defer d.uplinks.mu.Unlock()
	var out []InterfaceStatus
	for _, name := range slices.Sorted(maps.Keys(d.uplinks.status)) {
		s := d.uplinks.status[name]
		l, known := d.uplinks.links[d.uplinks.index[name]]
		s.Down = known && !l.running
		out = append(out, s)
	}
	return out
}
