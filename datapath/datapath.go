package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/steelyard-lb/steelyard/lb"
)

// Datapath is the forwarding in the kernel, as far as this process is needed for it: to change it and to tidy up.
type Datapath struct {
	o        Options
	log      *slog.Logger
	objects  *syObjects
	pins     *pins
	uplinks  *attachments
	services *services
	tunnels  *tunnels
	probes   *probes
	upkeep   *upkeep
	reasons  []string
	actions  []string
	commits  []string
}

// Open loads the programs, or takes over from an earlier agent, and attaches them. Nothing that the kernel forwards is
// disturbed, also when Open fails.
func Open(o Options) (_ *Datapath, err error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("open the datapath: %w", err)
	}
	d := &Datapath{o: o, log: o.Log}
	if d.reasons, err = reasonNames(); err != nil {
		return nil, err
	}
	if d.actions, err = enumNames("action", "ACTION_"); err != nil {
		return nil, err
	}
	if d.commits, err = enumNames("commit", "COMMIT_"); err != nil {
		return nil, err
	}
	if d.pins, err = openPins(o.PinPath); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if d.objects, err = load(o, d.pins.dir); err != nil {
		return nil, err
	}
	if d.services, err = openServices(d.objects, d.pins, o.Log); err != nil {
		return nil, err
	}
	d.tunnels = &tunnels{objects: d.objects, delivers: o.Delivers, always: o.TunnelSources}
	if !o.Delivers { // else whoever knows the other machines says so soon; until then those of an earlier agent may go on
		if err := d.tunnels.set(nil); err != nil {
			return nil, err
		}
	}
	d.upkeep = newUpkeep(d.objects, d.services, o.Timeouts, o.Log)
	sys, err := openSysctls(o.StateDir)
	if err != nil {
		return nil, err
	}
	if err := sys.reserve(o.SNATPorts); err != nil {
		// In a container without privileges sysctls are read-only. The ports are above those that Linux gives away by default.
		o.Log.Warn("snat_ports not kept from sockets of this machine", "err", err,
			"fix", fmt.Sprintf("sysctl -w net.ipv4.ip_local_reserved_ports=%d-%d", o.SNATPorts[0], o.SNATPorts[1]))
	}
	d.uplinks = &attachments{
		o: o, objects: d.objects, pins: d.pins, sysctls: sys,
		status: map[string]InterfaceStatus{}, index: map[string]int{},
	}
	d.probes = &probes{objects: d.objects, uplinks: d.uplinks, marks: map[probeKey]uint32{}}
	for _, name := range o.Interfaces {
		if err := d.uplinks.attach(name); err != nil {
			return nil, err
		}
	}
	return d, d.uplinks.prune()
}

// Held implements lb.Datapath.
func (d *Datapath) Held() ([]lb.Frontend, error) { return d.services.held(), nil }

// Apply implements lb.Datapath. Ends of flows that d asks for follow within about 100 ms, in Run.
func (d *Datapath) Apply(_ context.Context, delta lb.Delta) map[lb.Frontend]error {
	failed := map[lb.Frontend]error{}
	for _, f := range delta.Delete {
		id, err := d.services.remove(f)
		if err != nil {
			failed[f] = fmt.Errorf("remove frontend %s: %w", f, err)
			continue
		}
		d.upkeep.endFrontend(id)
	}
	for _, l := range d.services.put(delta.Put) {
		if l.err != nil {
			failed[l.plan.Frontend] = fmt.Errorf("put frontend %s: %w", l.plan.Frontend, l.err)
			continue
		}
		d.upkeep.endBackends(l.f.id, l.dead)
		if l.turn {
			d.upkeep.endFlows(l.f.id)
		}
	}
	return failed
}

// Run tidies up until ctx ends: flows that are over or whose backend is dead, interfaces that come and go, addresses
// towards backends that change.
func (d *Datapath) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.upkeep.run(ctx) })
	g.Go(func() error { return d.watch(ctx) })
	return g.Wait()
}

// watch follows the kernel's links, addresses and routes.
func (d *Datapath) watch(ctx context.Context) error {
	links, addrs, routes := make(chan netlink.LinkUpdate, 64), make(chan netlink.AddrUpdate, 64), make(chan netlink.RouteUpdate, 64)
	done := make(chan struct{})
	defer close(done)
	onError := func(err error) { d.log.Debug("netlink", "err", err) }
	err := errors.Join(
		netlink.LinkSubscribeWithOptions(links, done, netlink.LinkSubscribeOptions{ListExisting: true, ErrorCallback: onError}),
		netlink.AddrSubscribeWithOptions(addrs, done, netlink.AddrSubscribeOptions{ErrorCallback: onError}),
		netlink.RouteSubscribeWithOptions(routes, done, netlink.RouteSubscribeOptions{ErrorCallback: onError}))
	if err != nil {
		return fmt.Errorf("watch the network: %w", err)
	}
	// Routes change in bursts; one look after the burst is enough.
	settle := time.NewTimer(time.Hour)
	defer settle.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case u := <-links:
			if u.Link != nil {
				d.uplinks.linkChanged(u)
			}
		case <-addrs:
			settle.Reset(100 * time.Millisecond)
		case <-routes:
			settle.Reset(100 * time.Millisecond)
		case <-settle.C:
			d.services.refreshSources()
			if err := d.tunnels.refresh(); err != nil {
				d.log.Error("own addresses not refreshed", "err", err)
			}
		}
	}
}

// Close closes what this process holds. Everything stays in force in the kernel.
func (d *Datapath) Close() error {
	var err error
	if d.objects != nil {
		err = d.objects.Close()
	}
	return errors.Join(err, d.pins.close())
}

// Interfaces returns how programs are attached, by name.
func (d *Datapath) Interfaces() []InterfaceStatus {
	d.uplinks.mu.Lock()
	defer d.uplinks.mu.Unlock()
	var out []InterfaceStatus
	for _, name := range slices.Sorted(maps.Keys(d.uplinks.status)) {
		out = append(out, d.uplinks.status[name])
	}
	return out
}
