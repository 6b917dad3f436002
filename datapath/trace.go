package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/datapath/internal/trace"
	"github.com/steelyard-lb/steelyard/lb"
)

// traceInterval is how often a trace passes on what the programs have recorded.
const traceInterval = 20 * time.Millisecond

// tracing lets one trace run at a time.
type tracing struct {
	running chan struct{} // has an element while a trace runs
	mu      sync.Mutex    // guards all below
	end     context.CancelFunc
	closed  bool
}

// traceWait is how long a trace waits for the end of the previous one, whose reader may have just gone.
const traceWait = time.Second

// begin returns a context that close ends as well, or lb.ErrTracing if a trace is running.
func (t *tracing) begin(ctx context.Context) (context.Context, error) {
	select {
	case t.running <- struct{}{}:
	case <-time.After(traceWait):
		return nil, lb.ErrTracing
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		<-t.running
		return nil, errors.New("the agent is stopping")
	}
	ctx, t.end = context.WithCancel(ctx)
	return ctx, nil
}

// close ends the trace, waits for its end, and lets no other one begin.
func (t *tracing) close() {
	t.mu.Lock()
	t.closed = true
	if t.end != nil {
		t.end()
	}
	t.mu.Unlock()
	t.running <- struct{}{}
	<-t.running
}

// TracePart adds the packets of other programs to a trace: those of package inside.
type TracePart interface {
	// TraceAt returns where a Service listens.
	TraceAt(service string) []trace.At
	// BeginTrace exchanges the programs for those that record. end exchanges them again.
	BeginTrace(t *trace.Tracer) (end func() error, err error)
	// Traced completes a packet from a record of these programs.
	Traced(trace.Record, *lb.TracedPacket)
}

// Trace passes the packets that f selects to emit, in batches, until ctx ends or emit fails. The first batch is empty
// and says that the trace has begun. Until its end, the programs on the interfaces are others, which record packets. If
// the agent dies, they stop recording after trace.Alive, and the next agent replaces them, as it replaces all programs.
// part may be nil.
func (d *Datapath) Trace(
	ctx context.Context, f lb.TraceFilter, part TracePart, emit func([]lb.TraceEvent) error,
) (err error) {
	filter, err := d.traceFilter(f, part)
	if err != nil {
		return err
	}
	if ctx, err = d.tracing.begin(ctx); err != nil {
		return err
	}
	defer func() { <-d.tracing.running }()
	defer d.tracing.end()
	t, err := trace.Open(filter)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	d.log.Info("trace begins", filters(f)...)
	var gone error // of emit
	endPart := func() error { return nil }
	defer func() {
		if err = errors.Join(err, d.hooks.Use(hook.Plain(d.objects)), endPart(), t.Close()); err != nil {
			d.log.Error("trace failed", "err", err)
		} else {
			d.log.Info("trace ended")
		}
		err = cmp.Or(err, gone)
	}()
	programs, err := t.Balancer(d.constants, d.objects.PinnedMaps())
	if err == nil {
		err = d.hooks.Use(programs)
	}
	if err == nil && part != nil {
		endPart, err = part.BeginTrace(t)
	}
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	var renewing sync.WaitGroup
	defer renewing.Wait()
	defer d.tracing.end()
	renewing.Go(func() { d.renewTrace(ctx, t) })
	for batch := []lb.TraceEvent(nil); ctx.Err() == nil; {
		if gone = emit(batch); gone != nil {
			return nil
		}
		if batch, err = d.traced(t, part); err != nil {
			return fmt.Errorf("trace: %w", err)
		}
	}
	return nil
}

// filters returns what f selects, for the log.
func filters(f lb.TraceFilter) (fields []any) {
	if f.Client.IsValid() {
		fields = append(fields, "client", f.Client)
	}
	if f.VIP.IsValid() {
		fields = append(fields, "vip", f.VIP)
	}
	if f.Service != "" {
		fields = append(fields, "service", f.Service)
	}
	return append(fields, "drops", f.Drops)
}

// renewTrace lets the programs record until ctx ends, even while emit waits for a slow reader, so that the packets that
// are not read are counted.
func (d *Datapath) renewTrace(ctx context.Context, t *trace.Tracer) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := t.Renew(); err != nil {
				d.log.Error("trace not renewed", "err", err)
			}
		}
	}
}

// traceFilter translates a service to its frontends, and to where it listens as part of the service proxy.
func (d *Datapath) traceFilter(f lb.TraceFilter, part TracePart) (trace.Filter, error) {
	filter := trace.Filter{Client: f.Client, Drops: f.Drops, Limit: lb.TraceLimit, Service: f.Service != ""}
	if filter.Service {
		frontends, service, _ := d.services.Names()
		vips := map[netip.Addr]bool{}
		for id, name := range service {
			if name == f.Service {
				filter.Frontends = append(filter.Frontends, id)
				vips[frontends[id].VIP] = true
			}
		}
		if part != nil {
			filter.At = part.TraceAt(f.Service)
		}
		if filter.Frontends == nil && filter.At == nil {
			return filter, fmt.Errorf("trace: the datapath has nothing of the service %q", f.Service)
		}
		if filter.At == nil { // otherwise the service may have node ports, at each address of the node
			filter.VIPs = slices.Collect(maps.Keys(vips))
		}
	}
	if f.VIP.IsValid() {
		filter.VIPs = []netip.Addr{f.VIP}
	}
	return filter, nil
}

// traced returns what the programs have recorded in an interval.
func (d *Datapath) traced(t *trace.Tracer, part TracePart) (batch []lb.TraceEvent, err error) {
	_, service, backends := d.services.Names()
	view, boot := d.hooks.View(), time.Now().Add(-monotonic())
	overLimit, full, err := t.Read(traceInterval, func(r trace.Record) {
		p := &lb.TracedPacket{
			Time: boot.Add(time.Duration(r.Time)), Interface: view.Name(r.Ifindex), Hook: r.Hook,
			Action: d.names.Actions[r.Action], Reason: d.names.Reasons[r.Reason],
			Reply:  r.Reply == 1,
			Before: lb.Frame{Length: int(r.Len), Bytes: r.Before},
			After:  lb.Frame{Length: int(r.LenAfter), Bytes: r.After},
		}
		p.Meaning = meaning(p.Reason)
		if r.Proxy {
			part.Traced(r, p)
		} else if r.Counted > 0 {
			p.Service = service[r.Frontend]
		}
		if r.Counted == 2 && !r.Proxy {
			p.Backend = backends[r.Backend]
		}
		if p.Action == "forward" {
			p.Forward = table.DecodeMethod(bpf.Method(r.Method))
		}
		if r.Egress != 0 {
			p.Egress = view.Name(r.Egress)
		}
		batch = append(batch, lb.TraceEvent{Packet: p})
	})
	if overLimit+full > 0 {
		batch = append(batch, lb.TraceEvent{OverLimit: overLimit, NotRead: full})
	}
	return batch, err
}

// monotonic returns the time of bpf_ktime_get_ns.
func monotonic() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic("datapath: no monotonic clock: " + err.Error())
	}
	return time.Duration(t.Nano())
}
