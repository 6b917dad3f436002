package inside

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/datapath/internal/trace"
	"github.com/steelyard-lb/steelyard/lb"
)

// TraceAt returns where a Service listens, as datapath.TracePart.
func (i *Inside) TraceAt(service string) (all []trace.At) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, e := range i.services.rules[service] {
		at := trace.At{Port: e.key.Port, Proto: e.key.Proto}
		at.Addr.W = e.key.Addr.W
		all = append(all, at)
	}
	return all
}

// loadTraced loads the programs that record, with the maps of the others.
func loadTraced(t *trace.Tracer, o *prog.Objects, constants map[string]any) (map[string]*ebpf.Program, error) {
	return t.Proxy(constants, map[string]*ebpf.Map{
		"sy_in_services": o.Services, "sy_in_endpoints": o.Endpoints, "sy_in_members": o.Members,
		"sy_in_allow": o.Allow, "sy_in_affinity": o.Affinity, "sy_in_flows": o.Flows, "sy_in_addrs": o.Addrs,
		"sy_in_devices": o.Devices, "sy_in_sources": o.Sources, "sy_in_ranges": o.Ranges, "sy_in_direct": o.Direct,
		"sy_in_outside": o.Outside, "sy_in_counters": o.Counters, "sy_frags": o.Frags,
	})
}

// BeginTrace exchanges the programs on the devices for those that record packets, as datapath.TracePart.
func (i *Inside) BeginTrace(t *trace.Tracer) (end func() error, err error) {
	end = func() error { return nil }
	i.mu.Lock()
	drained, o := i.drained, i.objects
	i.mu.Unlock()
	if drained {
		return end, nil
	}
	traced, err := loadTraced(t, o, i.constants)
	if err != nil {
		return end, fmt.Errorf("service proxy: %w", err)
	}
	use := func(arrive, leave, send *ebpf.Program) error {
		i.publish(arrive, leave) // or Watch would attach the others again
		err := errors.Join(i.devices.use(arrive, leave), i.device.use(send))
		if err != nil {
			err = fmt.Errorf("service proxy: exchange the programs: %w", err)
		}
		return err
	}
	end = func() error { return use(o.Arrive, o.Leave, o.Send) }
	return end, use(traced["sy_in_arrive"], traced["sy_in_leave"], traced["sy_in_send"])
}

// Traced completes a packet from a record, as datapath.TracePart.
func (i *Inside) Traced(r trace.Record, p *lb.TracedPacket) {
	if r.Counted == 0 {
		return
	}
	at, proto := addrPort(prog.Addr{W: r.Service.Addr.W}, r.Service.Port), lb.Protocol(r.Service.Proto)
	i.mu.Lock()
	defer i.mu.Unlock()
	own := i.own.addrs[at.Addr()]
	e := i.services.find(at, proto, prog.Inside, own)
	if e = cmp.Or(e, i.services.find(at, proto, prog.Outside, own)); e != nil {
		p.Service = e.rule.Service()
	}
	if r.Counted == 2 {
		p.Backend = addrPort(prog.Addr{W: r.Endpoint.Addr.W}, r.Endpoint.Port)
	}
}

// use exchanges the programs of all devices. What fails, the next Sync tries again.
func (d *devices) use(in, out *ebpf.Program) (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for n, p := range []*ebpf.Program{in, out} {
		d.hooks[n] = newProgram(d.hooks[n].name, d.hooks[n].at, p)
	}
	for index, s := range d.states {
		if !s.attached {
			continue
		}
		for _, h := range d.hooks {
			if e := h.exchange(index, d.o.pins); e != nil && !isGone(index) {
				err = errors.Join(err, fmt.Errorf("interface %s: %w", s.name, e))
			}
		}
	}
	return err
}

// use exchanges the program of the device.
func (d *device) use(send *ebpf.Program) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := newProgram(d.send.name, d.send.at, send)
	d.send = &h
	return h.exchange(d.index, "")
}

// exchange replaces the program that is attached in one step, so that each packet is processed by one or the other, in
// its place among other programs.
func (h program) exchange(index int, pins string) error {
	l, err := netlink.LinkByIndex(index)
	if err != nil {
		return err
	}
	own, _, _, err := h.filters(l)
	if err != nil {
		return err
	}
	if own != nil {
		return h.setFilter(l)
	}
	pinned, err := link.LoadPinnedLink(h.pin(index, pins), nil)
	if errors.Is(err, fs.ErrNotExist) { // another program has removed it
		_, err = h.attach(l, pins)
		return err
	}
	if err != nil {
		return err
	}
	defer pinned.Close()
	return pinned.Update(h.prog)
}
