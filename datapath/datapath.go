package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/lb"
)

// Datapath controls forwarding in the kernel: it updates the maps and removes ended flows.
type Datapath struct {
	o         Options
	log       *slog.Logger
	constants map[string]any // of the programs
	objects   *bpf.Objects
	chunks    *table.Chunks
	pins      *pin.Pins
	sysctls   *sysctl.Settings
	hooks     *hook.Hooks
	services  *table.Services
	tunnels   *table.Tunnels
	flows     *flow.Collector
	verifier  *verify.Verifier
	names     bpf.Names
	tracing   tracing
}

// Open loads and attaches the programs, or takes over from a previous agent. If a first start fails, it leaves nothing
// behind. If a takeover fails, the previous agent's maps, links and programs stay active.
func Open(o Options) (_ *Datapath, err error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("open the datapath: %w", err)
	}
	if err := checkCapabilities(); err != nil {
		return nil, err
	}
	release, err := kernelRelease()
	if err := errors.Join(err, checkKernel(release, o.AllowUntestedKernel, lackedFeatures)); err != nil {
		return nil, err
	}
	d := &Datapath{o: o, log: o.Log, tracing: tracing{running: make(chan struct{}, 1)}}
	spec, err := bpf.LoadSy()
	if err != nil {
		return nil, fmt.Errorf("read the embedded programs: %w", err)
	}
	if d.names, err = bpf.ReadNames(spec); err != nil {
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
	if err := d.open(spec, t); err != nil {
		return nil, err
	}
	if err := d.pins.Publish(); err != nil {
		return nil, err
	}
	if err := errors.Join(d.hooks.Commit(), d.services.Filter.Sync()); err != nil {
		return nil, err
	}
	if !o.Delivers { // otherwise SetTunnelSources follows soon, and the previous agent's sources remain until then
		if err := d.tunnels.Set(nil); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// open loads and activates the programs. Each step registers its undo function with t.
func (d *Datapath) open(spec *ebpf.CollectionSpec, t *pin.Transaction) (err error) {
	d.constants = constants(d.o)
	objects, inner, err := load(d.o, spec, d.constants, d.pins, t)
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
	if d.o.servesSelf() {
		d.services.ServeSelf()
	}
	if d.o.TunnelKeys != nil {
		if err := d.SetTunnelKeys(*d.o.TunnelKeys); err != nil {
			return err
		}
	}
	if d.tunnels, err = table.NewTunnels(d.objects, filter, d.o.TunnelSources, d.o.Own); err != nil {
		return err
	}
	if err := d.tunnels.Refresh(); err != nil {
		return err
	}
	d.flows, err = flow.New(d.objects, d.services, d.pins.First(), d.o.Timeouts, d.log)
	if err != nil {
		return err
	}
	if d.sysctls, err = sysctl.Open(d.o.StateDir, d.log); err != nil {
		return err
	}
	t.OnFailure(d.sysctls.Checkpoint())
	if err := d.sysctls.Reserve(d.o.ports()); err != nil {
		// In an unprivileged container sysctls are read-only. By default, Linux assigns only lower ports than these.
		d.log.Warn("snat_ports not reserved", "err", err,
			"fix", "add them to the sysctl net.ipv4.ip_local_reserved_ports", "ports", d.o.SNATPorts)
	}
	d.hooks = hook.New(hook.Deps{
		Objects: d.objects, Chunks: d.chunks, Pins: d.pins, Sysctls: d.sysctls, Flows: d.flows, Log: d.log,
	}, hook.Options{
		Interfaces: d.o.Interfaces, Keep: d.o.Keep, FollowRoutes: d.o.FollowRoutes, Delivers: d.o.Delivers,
		LocalClients: d.o.LocalClients, ForceClsact: d.o.ForceClsact, Mode: d.o.Mode,
		Attached: func(name string) error { return d.o.inject("attach " + name) },
	}, t)
	o := verify.Options{
		FollowRoutes: d.o.FollowRoutes, Routers: d.o.Routers, Reach: d.o.Reach, TunnelPort: d.o.TunnelPort,
		Boundary: d.o.Boundary,
	}
	d.verifier = verify.New(verify.Deps{
		Objects: d.objects, Services: d.services, Tunnels: d.tunnels, Flows: d.flows, Hooks: d.hooks,
		Chunks: d.chunks, Names: d.names, Meaning: meaning, Log: d.log,
	}, o)
	d.services.FollowRules()
	return d.hooks.Attach(o.Needed(new(route.Cache), d.services.Interfaces(nil)))
}

// Held implements lb.Datapath.
func (d *Datapath) Held() ([]lb.Frontend, error) { return d.services.Held(), nil }

// Apply implements lb.Datapath. Flows to a backend that is down end immediately: their packets are treated as packets
// of unknown flows. Run removes these flows and the flows of removed frontends within seconds.
func (d *Datapath) Apply(_ context.Context, delta lb.Delta) map[lb.Frontend]error {
	failed := map[lb.Frontend]error{}
	for _, f := range delta.Delete {
		id, err := d.services.Remove(f)
		if err != nil {
			failed[f] = fmt.Errorf("remove frontend %s: %w", f, err)
			continue
		}
		d.flows.End(id, 0)
	}
	updates := d.updates(delta.Put, failed)
	d.services.Put(updates, delta.Later)
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
			d.flows.Wake()
		}
		if u.MethodChanged {
			d.flows.End(u.Frontend.ID, bpf.Method(u.Value.Method))
		}
	}
	if slices.ContainsFunc(updates, func(u *table.Update) bool { return u.First && table.BalancesSockets(u.Plan) }) {
		d.hooks.BalanceSockets()
	}
	d.verifier.Applied(updates, delta.Delete)
	return failed
}

// updates computes the slot tables of plans before anything is locked or written. It omits the plans that have none,
// and adds them to failed.
func (d *Datapath) updates(plans []*lb.FrontendPlan, failed map[lb.Frontend]error) (updates []*table.Update) {
	for _, p := range plans {
		u := &table.Update{Plan: p}
		if d.o.Boundary.Do(lb.PartTable, p.Service+" "+p.Frontend.String(), func() { u.Table = p.Table() }) {
			updates = append(updates, u)
		} else {
			failed[p.Frontend] = fmt.Errorf("%w: its table cannot be computed", lb.ErrRefused)
		}
	}
	return updates
}

// Run removes ended flows, follows changes of interfaces, addresses and routes, and releases unneeded interfaces until
// ctx ends.
func (d *Datapath) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.flows.Run(ctx) })
	g.Go(func() error { return d.services.Run(ctx) })
	g.Go(func() error { return d.verifier.Run(ctx) })
	g.Go(func() error { return d.hooks.Run(ctx) })
	return g.Wait()
}

// Flows lists flows. more is true if the filter's limit was reached or ctx ended before all flows were read. Flows that
// change during the call may be missing.
func (d *Datapath) Flows(ctx context.Context, want lb.FlowFilter) (flows []lb.FlowStatus, more bool, err error) {
	return d.flows.List(ctx, want)
}

// EndFlows ends the flows that a filter selects, except flows with direct return. It returns how many it has ended and
// kept.
func (d *Datapath) EndFlows(ctx context.Context, want lb.FlowFilter) (ended, kept int, err error) {
	return d.flows.EndFlows(ctx, want)
}

// Close closes this process's file descriptors. The kernel continues forwarding.
func (d *Datapath) Close() error {
	d.tracing.close()
	var err error
	if d.services != nil {
		err = d.services.Close()
	}
	if d.hooks != nil {
		err = errors.Join(err, d.hooks.Close())
	}
	if d.objects != nil {
		err = errors.Join(err, d.objects.Close())
	}
	if d.chunks != nil {
		d.chunks.Close()
	}
	if d.verifier != nil {
		d.verifier.Close()
	}
	return errors.Join(err, d.pins.Close())
}

// Interfaces returns the attachment of each interface, sorted by name.
func (d *Datapath) Interfaces() []InterfaceStatus { return d.hooks.Interfaces() }

// ProbeWay returns the SO_MARK and source address that a health check to a VIP needs to reach the given server of a
// service with dsr or tunnel. It reads the route from the kernel, so call it for every check.
func (d *Datapath) ProbeWay(
	vip, server netip.Addr, method lb.Method, encap lb.Encap,
) (mark uint32, from netip.Addr, err error) {
	return d.hooks.ProbeWay(vip, server, method, encap)
}

// OnFault registers report, which receives, for each VIP whose state changes, why its packets are not forwarded or
// answered, or "" if they are. The first report about a VIP comes before the Apply that adds the VIP returns. Call
// OnFault before Apply and Run.
func (d *Datapath) OnFault(report func(changed map[netip.Addr]string)) { d.verifier.Report = report }

// Findings returns states that lose or may lose packets although addresses are announced, and changes that Cleanup
// cannot undo.
func (d *Datapath) Findings() []lb.Finding {
	return slices.Concat(d.verifier.Findings(), d.keptSize(), d.pinsWritable())
}

// Explain returns the programs' decision for the first packet of a flow, and whether the client receives the reply. It
// runs the programs' own code, sends no packets and changes no map.
func (d *Datapath) Explain(q lb.Question) (lb.Explanation, error) { return d.verifier.Explain(q) }

// SetTunnelSources makes the datapath accept tunnel packets only from these addresses and from Options.TunnelSources.
func (d *Datapath) SetTunnelSources(addrs []netip.Addr) error { return d.tunnels.Set(addrs) }

// SetTunnelKeys replaces the tunnel keys.
func (d *Datapath) SetTunnelKeys(k TunnelKeys) error {
	value, err := k.Encode()
	if err != nil {
		return fmt.Errorf("set the tunnel keys: %w", err)
	}
	if err := d.objects.SyTunnelKeys.Put(uint32(0), value); err != nil {
		return fmt.Errorf("set the tunnel keys: %w", err)
	}
	return nil
}
