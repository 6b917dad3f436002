// Package trace loads the programs that record packets (bpf/trace.h), and reads their records.
package trace

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
)

// Filter selects the packets that are recorded (lb.TraceFilter).
type Filter struct {
	Client    netip.Addr   // invalid: any
	VIPs      []netip.Addr // empty: any
	Service   bool         // only packets of Frontends and At
	Frontends []uint32
	At        []At // of the service proxy
	Drops     bool
	Limit     uint32 // records per second
}

// Head is a record without its bytes.
type Head = trTraceHead

// At is where a Service or an endpoint of the service proxy listens.
type At = trTraceAt

// Record is what the programs recorded of a packet.
type Record struct {
	Head
	Hook          string // xdp, tc or tc-out, of the service proxy proxy or proxy-out
	Proxy         bool   // the service proxy's
	Before, After []byte // the first bytes
}

// hooks has the names of enum trace_hook.
var hooks = [...]string{
	trTraceHookTRACE_XDP: "xdp", trTraceHookTRACE_TC_IN: "tc", trTraceHookTRACE_TC_OUT: "tc-out",
	trTraceHookTRACE_PROXY: "proxy", trTraceHookTRACE_PROXY_OUT: "proxy-out",
}

// Alive is how long the programs record after a Renew.
const Alive = 5 * time.Second

// Tracer holds the loaded programs and their records.
type Tracer struct {
	loaded  []*ebpf.Collection
	shared  map[string]*ebpf.Map // maps of all programs
	ring    *ringbuf.Reader
	filter  Filter
	config  trTraceConfig
	counted trTraceCount // as of the last Read
}

// Maps that the programs of the load balancer and of the service proxy share.
const configMap, countMap, ringMap = "sy_trace", "sy_trace_count", "sy_trace_ring"

// Open returns a tracer without programs.
func Open(f Filter) (_ *Tracer, err error) {
	spec, err := loadTr()
	if err != nil {
		return nil, fmt.Errorf("read the embedded programs: %w", err)
	}
	t := &Tracer{filter: f, config: encode(f), shared: map[string]*ebpf.Map{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.Close())
		}
	}()
	for _, name := range []string{configMap, countMap, ringMap} {
		if t.shared[name], err = ebpf.NewMap(spec.Maps[name]); err != nil {
			return nil, fmt.Errorf("create the map %s: %w", name, err)
		}
	}
	if t.ring, err = ringbuf.NewReader(t.shared[ringMap]); err != nil {
		return nil, fmt.Errorf("read the ring buffer: %w", err)
	}
	return t, nil
}

// Balancer loads the programs of the load balancer with the maps of the active ones and the same values of their
// constants. Nothing is attached.
func (t *Tracer) Balancer(constants map[string]any, active map[string]*ebpf.Map) (p hook.Programs, err error) {
	spec, err := loadTr()
	if err != nil {
		return p, fmt.Errorf("read the embedded programs: %w", err)
	}
	shared := t.share(spec, active)
	if err := bpf.SetVariables(spec, bpf.Sizes(spec.Maps)); err != nil {
		return p, err
	}
	all, err := t.load(spec, constants, shared)
	if err != nil {
		return p, err
	}
	for _, id := range t.filter.Frontends {
		if err := all.Maps["sy_trace_fes"].Put(id, uint32(1)); err != nil {
			return p, fmt.Errorf("put a frontend: %w", err)
		}
	}
	of := all.Programs
	return hook.Programs{XDP: of["sy_xdp"], In: of["sy_tc_in"], Decap: of["sy_tc_decap"], Out: of["sy_tc_out"]}, nil
}

// Proxy is Balancer for the programs of the service proxy, which it returns by name.
func (t *Tracer) Proxy(constants map[string]any, active map[string]*ebpf.Map) (map[string]*ebpf.Program, error) {
	spec, err := loadProxy()
	if err != nil {
		return nil, fmt.Errorf("read the embedded programs: %w", err)
	}
	all, err := t.load(spec, constants, t.share(spec, active))
	if err != nil {
		return nil, err
	}
	for _, at := range t.filter.At {
		if err := all.Maps["sy_trace_services"].Put(at, uint32(1)); err != nil {
			return nil, fmt.Errorf("put where the service listens: %w", err)
		}
	}
	return all.Programs, nil
}

// share returns the maps that exist, and removes from spec those that no program uses.
func (t *Tracer) share(spec *ebpf.CollectionSpec, active map[string]*ebpf.Map) map[string]*ebpf.Map {
	used := map[string]bool{}
	for _, p := range spec.Programs {
		for _, i := range p.Instructions {
			used[i.Reference()] = true
		}
	}
	shared := map[string]*ebpf.Map{}
	for name, m := range spec.Maps {
		if now := cmp.Or(active[name], t.shared[name]); !used[name] {
			delete(spec.Maps, name)
		} else if now != nil {
			shared[name], m.MaxEntries = now, now.MaxEntries()
		}
	}
	return shared
}

func (t *Tracer) load(
	spec *ebpf.CollectionSpec, constants map[string]any, shared map[string]*ebpf.Map,
) (*ebpf.Collection, error) {
	if err := bpf.SetVariables(spec, constants); err != nil {
		return nil, err
	}
	all, err := bpf.LoadConcurrently(spec, ebpf.CollectionOptions{MapReplacements: shared}, nil)
	if err != nil {
		return nil, fmt.Errorf("load the programs: %w", err)
	}
	t.loaded = append(t.loaded, all)
	return all, t.Renew() // here, because loading can take longer than Alive
}

func encode(f Filter) trTraceConfig {
	c := trTraceConfig{
		Limit: f.Limit, Client: toAddr(f.Client), Drops: bpf.Truth(f.Drops),
		ByService: bpf.Truth(f.Service),
	}
	if len(f.VIPs) == 0 || len(f.VIPs) > len(c.Vips) { // ByService selects the packets if there are too many
		c.AnyVip = 1
		return c
	}
	for i := range c.Vips {
		c.Vips[i] = toAddr(f.VIPs[min(i, len(f.VIPs)-1)])
	}
	return c
}

func toAddr(a netip.Addr) trAddr { return trAddr{W: bpf.ToAddr(a).W} }

// Renew lets the programs record for some more seconds.
func (t *Tracer) Renew() error {
	t.config.Until = uint64(bpf.Uptime() + Alive)
	if err := t.shared[configMap].Put(uint32(0), t.config); err != nil {
		return fmt.Errorf("renew the trace: %w", err)
	}
	return nil
}

// Read passes the records of the next interval to each. Then it returns how many packets were not recorded since the
// last call: because of the limit, and because the ring buffer was full.
func (t *Tracer) Read(interval time.Duration, each func(Record)) (overLimit, full uint64, err error) {
	// The programs do not wake the reader, which would cost them a lot. It finds the records when its time is over.
	t.ring.SetDeadline(time.Now().Add(interval))
	var raw ringbuf.Record
	for {
		err := t.ring.ReadInto(&raw)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return 0, 0, fmt.Errorf("read the ring buffer: %w", err)
		}
		r, err := decode(raw.RawSample)
		if err != nil {
			return 0, 0, err
		}
		each(r)
	}
	was := t.counted
	if err := t.shared[countMap].Lookup(uint32(0), &t.counted); err != nil {
		return 0, 0, fmt.Errorf("read the number of packets left out: %w", err)
	}
	return t.counted.OverLimit - was.OverLimit, t.counted.RingFull - was.RingFull, nil
}

// decode copies a record from the ring buffer.
func decode(raw []byte) (r Record, err error) {
	n, err := binary.Decode(raw, binary.NativeEndian, &r.Head)
	var room trTraceRecord
	if err != nil || len(raw) < n+len(room.Before)+len(room.After) {
		return r, fmt.Errorf("a record has %d bytes", len(raw))
	}
	before, after := raw[n:n+len(room.Before)], raw[n+len(room.Before):]
	r.Before = append([]byte(nil), before[:min(int(r.Len), len(before))]...)
	r.After = append([]byte(nil), after[:min(int(r.LenAfter), len(room.After))]...)
	if int(r.Head.Hook) < len(hooks) {
		r.Hook = hooks[r.Head.Hook]
	}
	r.Proxy = r.Head.Hook >= uint8(trTraceHookTRACE_PROXY)
	return r, nil
}

// Close unloads what is not attached.
func (t *Tracer) Close() (err error) {
	if t.ring != nil {
		err = t.ring.Close()
	}
	for _, all := range t.loaded {
		all.Close()
	}
	for _, m := range t.shared {
		err = errors.Join(err, m.Close())
	}
	return err
}
