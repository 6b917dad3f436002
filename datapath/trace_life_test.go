package datapath

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/trace"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Other programs are attached during a trace, the verifier leaves them attached, and afterwards the plain ones are
// attached again.
func TestTraceReplacesPrograms(t *testing.T) {
	t.Parallel()
	for _, tcHook := range labtest.TCHooks(t) {
		t.Run(tcHook, func(t *testing.T) {
			fx := newFixture(t, hookXDP, false, func(o *Options) { o.ForceClsact = tcHook == "clsact" })
			web(fx)
			plain := fx.attachedIDs()
			tr := fx.trace(lb.TraceFilter{})
			during := fx.attachedIDs()
			for i := range plain {
				must.True(t, plain[i] != during[i], "program %d is attached during the trace", plain[i])
			}
			fx.changed()
			must.Equal(t, during, fx.attachedIDs())
			must.Equal(t, 0, fx.d.hooks.Repairs()["programs"])
			err := fx.d.Trace(t.Context(), lb.TraceFilter{}, nil, nil)
			must.True(t, errors.Is(err, lb.ErrTracing), "a second trace: %v", err)
			tr.stop()
			must.Equal(t, plain, fx.attachedIDs())
			again := fx.trace(lb.TraceFilter{})
			again.stop()
			must.Equal(t, plain, fx.attachedIDs())
			err = fx.d.Trace(t.Context(), lb.TraceFilter{Service: "mail"}, nil, nil)
			must.True(t, err != nil && strings.Contains(err.Error(), "mail"), "a missing service: %v", err)
		})
	}
}

// The log has the filters that are set. A reader that goes is no error.
func TestTraceLog(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	fx := newFixture(t, hookXDP, false, nil)
	fx.d.log = slog.New(slog.NewTextHandler(&text, nil))
	gone := errors.New("broken pipe")
	fx.do(func() error {
		filter := lb.TraceFilter{VIP: fx.addr("vip")}
		err := fx.d.Trace(t.Context(), filter, nil, func([]lb.TraceEvent) error { return gone })
		must.True(t, errors.Is(err, gone), "%v", err)
		return nil
	})
	want := fmt.Sprintf(`^.* msg="trace begins" vip=%s drops=false\n.* level=INFO msg="trace ended"\n$`, fx.addr("vip"))
	must.True(t, regexp.MustCompile(want).MatchString(text.String()), "%s", &text)
}

// A datapath that is closed during a trace leaves the plain programs. One that dies leaves the others, and the next one
// replaces them.
func TestTraceDoesNotOutliveTheAgent(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	plain, tr := fx.attachedIDs(), fx.trace(lb.TraceFilter{})
	fx.d.tracing.close() // what Close does first
	must.Do(t, <-tr.ended)
	must.Equal(t, plain, fx.attachedIDs())
	fx.programs = nil
	err := fx.d.Trace(t.Context(), lb.TraceFilter{}, nil, nil)
	must.True(t, err != nil && !errors.Is(err, lb.ErrTracing), "a trace after Close: %v", err)

	dying := must.Get(trace.Open(trace.Filter{Limit: 10}))(t)
	programs := must.Get(dying.Balancer(fx.d.constants, fx.d.objects.PinnedMaps()))(t)
	fx.do(func() error { return fx.d.hooks.Use(programs) })
	left := fx.attachedIDs()
	must.Do(t, dying.Close())
	fx.close()
	fx.load()
	for i, id := range fx.attachedIDs() {
		must.True(t, id != left[i], "program %d is still attached", id)
	}
}

// Without an agent that reads, the programs record nothing after a few seconds, and forward as before.
func TestTraceExpires(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	web(fx)
	tracer := must.Get(trace.Open(trace.Filter{Limit: 1000}))(t)
	defer tracer.Close()
	p := must.Get(tracer.Balancer(fx.d.constants, fx.d.objects.PinnedMaps()))(t)
	fx.programs = &p
	read := func() (n int) {
		_, _, err := tracer.Read(0, func(trace.Record) { n++ })
		must.Do(t, err)
		return n
	}
	syn := func() {
		r := fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
		must.True(t, r.did == "sent", "%s: %s", r.did, r.reason)
	}
	syn()
	must.Equal(t, 1, read())
	time.Sleep(trace.Alive + 100*time.Millisecond) // CLOCK_MONOTONIC_COARSE cannot be changed
	syn()
	must.Equal(t, 0, read())
	must.Do(t, tracer.Renew())
	syn()
	must.Equal(t, 1, read())
	fx.programs = nil
}

// Packets beyond the limit are counted, and forwarded as the others.
func TestTraceLimit(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	only("10.0.0.0/8")(fx)
	tr := fx.trace(lb.TraceFilter{})
	const sent = 3 * lb.TraceLimit
	frame := fx.fromClient(dptest.TCP, dptest.SYN).Frame()
	began := time.Now()
	fx.do(func() error { // in each run the program gets what the last one left, so it must be a drop
		result, err := fx.programs.XDP.Run(&ebpf.RunOptions{Data: frame, Context: fx.xdp(frame), Repeat: sent})
		must.Equal(t, 1, result)
		return err
	})
	seconds := uint64(time.Since(began).Seconds()) + 2
	var packets, over, notRead uint64
	for packets+over+notRead < sent {
		for _, e := range tr.next() {
			if e.Packet != nil {
				packets++
			}
			over, notRead = over+e.OverLimit, notRead+e.NotRead
		}
	}
	must.True(t, packets+over+notRead == sent, "%d packets, %d over the limit, %d not read; want %d", packets, over,
		notRead, sent)
	must.True(t, packets > 0 && packets+notRead <= seconds*lb.TraceLimit && over > 0,
		"%d packets and %d not read in %d s, %d over the limit", packets, notRead, seconds, over)
	tr.stop()
}
