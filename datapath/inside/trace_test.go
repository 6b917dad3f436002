package inside

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/trace"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/capture"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// running is the trace of the process. datapath.Trace does the same.
var running struct {
	sync.Mutex
	tracer *trace.Tracer
	end    func() error
}

// TraceBegin begins a trace.
func (c *Control) TraceBegin(f lb.TraceFilter, _ *bool) (err error) {
	running.Lock()
	defer running.Unlock()
	filter := trace.Filter{Client: f.Client, Drops: f.Drops, Limit: lb.TraceLimit, Service: f.Service != ""}
	if filter.Service {
		filter.At = c.i.TraceAt(f.Service)
	}
	if f.VIP.IsValid() {
		filter.VIPs = []netip.Addr{f.VIP}
	}
	if running.tracer, err = trace.Open(filter); err == nil {
		running.end, err = c.i.BeginTrace(running.tracer)
	}
	return err
}

// Published returns the ids of the programs for Watch.
func (c *Control) Published(_ bool, ids *[]int) error {
	for _, pin := range watchPins(c.i.o.Pins) {
		p, err := ebpf.LoadPinnedProgram(pin, nil)
		if err != nil {
			return err
		}
		info, err := p.Info()
		if err = errors.Join(err, p.Close()); err != nil {
			return err
		}
		id, _ := info.ID()
		*ids = append(*ids, int(id))
	}
	return nil
}

// TraceEnd ends it, and returns its packets.
func (c *Control) TraceEnd(_ bool, packets *[]lb.TracedPacket) error {
	running.Lock()
	defer running.Unlock()
	spec, err := bpf.LoadSy()
	if err != nil {
		return err
	}
	names, err := bpf.ReadNames(spec)
	if err != nil {
		return err
	}
	_, _, err = running.tracer.Read(20*time.Millisecond, func(r trace.Record) {
		p := lb.TracedPacket{
			Interface: index(r.Ifindex), Hook: r.Hook, Action: names.Actions[r.Action], Reason: names.Reasons[r.Reason],
			Meaning: "why", Reply: r.Reply == 1, Before: lb.Frame{Length: int(r.Len), Bytes: r.Before},
			After: lb.Frame{Length: int(r.LenAfter), Bytes: r.After},
		}
		if p.Action == "forward" {
			p.Forward = lb.MethodNAT
		}
		if r.Egress != 0 {
			p.Egress = index(r.Egress)
		}
		c.i.Traced(r, &p)
		*packets = append(*packets, p)
	})
	if err == nil {
		err = running.end()
	}
	if err == nil {
		err = running.tracer.Close()
	}
	return err
}

// index returns the name of an interface of this process's network namespace.
func index(i uint32) string {
	l, err := netlink.LinkByIndex(int(i))
	if err != nil {
		return err.Error()
	}
	return l.Attrs().Name
}

// traced returns the lines of the packets that f causes and the filter selects, without their times.
func (p *process) traced(filter lb.TraceFilter, f func()) (lines []string) {
	p.t.Helper()
	var packets []lb.TracedPacket
	p.call("TraceBegin", filter, new(bool))
	f()
	p.call("TraceEnd", true, &packets)
	for _, x := range packets {
		_, line, _ := strings.Cut(capture.Line(x), " ")
		lines = append(lines, line)
	}
	return lines
}

// has checks that a line matches a pattern, in which words stand for addresses.
func has(t *testing.T, lines []string, words map[string]string, pattern string) {
	t.Helper()
	for word, text := range words {
		pattern = strings.ReplaceAll(pattern, word, regexp.QuoteMeta(text))
	}
	want := regexp.MustCompile("^" + pattern + "$")
	for _, line := range lines {
		if want.MatchString(line) {
			return
		}
	}
	t.Errorf("no line\n%s\nin\n%s", pattern, strings.Join(lines, "\n"))
}

// A trace shows each packet to a Service as it arrived and as it left, with the Service and the endpoint.
func TestTrace(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	var rules []lb.NodeRule
	for _, is4 := range []bool{true, false} {
		any, local := netip.IPv6Unspecified(), n.rule("local:http", clusterIP(is4, 5), 80, lb.TCP)
		if is4 {
			any = netip.IPv4Unspecified()
		}
		local.Inside.Drop = true
		port := n.rule("far:http", any, 30000, lb.TCP, "q1")
		port.Outside = &port.Inside
		rules = append(rules, n.rule("far:http", clusterIP(is4, 1), 80, lb.TCP, "q1"), port,
			n.rule("self:http", clusterIP(is4, 2), 80, lb.TCP, "p1"),
			n.rule("dns:dns", clusterIP(is4, 3), 53, lb.UDP, "p2"),
			n.rule("empty:http", clusterIP(is4, 4), 80, lb.TCP), local)
	}
	p.apply(rules...)
	p1 := n.pods["p1"]
	for _, is4 := range []bool{true, false} {
		vip := func(i int, port uint16) netip.AddrPort { return netip.AddrPortFrom(clusterIP(is4, i), port) }
		node, outside := nodeV6, netip.MustParseAddr("2001:db8::50")
		if is4 {
			node, outside = nodeV4, netip.MustParseAddr("192.0.2.50")
		}
		port := func(a netip.Addr) string { return strings.TrimSuffix(netip.AddrPortFrom(a, 1).String(), "1") }
		words := map[string]string{
			"FAR": vip(1, 80).String(), "SELF": vip(2, 80).String(), "DNS": vip(3, 53).String(),
			"EMPTY": vip(4, 80).String(), "LOCAL": vip(5, 80).String(), "Q1": n.pods["q1"].at(is4, 8080).String(),
			"P1": p1.at(is4, 8080).String(), "P2": n.pods["p2"].at(is4, 5353).String(),
			"NODEPORT": netip.AddrPortFrom(node, 30000).String(), "FROMPOD": port(p1.at(is4, 1).Addr()),
			"FROMNODE": port(node), "FROMOUT": port(outside), "HAIRPIN": port(vip(2, 80).Addr()),
		}
		all := func() {
			for _, to := range []netip.AddrPort{vip(1, 80), vip(2, 80)} {
				_, _, err := get(t, p1.Host, to)
				must.Do(t, err)
			}
			_, _, err := get(t, n.outside, netip.AddrPortFrom(node, 30000))
			must.Do(t, err)
			must.Do(t, traffic.From(n.node).UDP(t.Context(), vip(3, 53), 1, 10, 5*time.Second).Err())
			_, _, err = get(t, p1.Host, vip(4, 80))
			must.True(t, err != nil, "a Service without an endpoint answers")
			must.True(t, dropped(t, p1.Host, vip(5, 80)), "a Service without a local endpoint answers")
		}
		lines := p.traced(lb.TraceFilter{}, all)
		for _, want := range []string{
			// A pod to another node's pod, and the reply.
			`veth-p1 proxy: forward: FROMPOD\d+ > FAR tcp SYN => FROMPOD\d+ > Q1 tcp SYN to the stack; ` +
				`service test/far, backend Q1, nat, request`,
			`veth-p1 proxy-out: forward: Q1 > FROMPOD\d+ tcp SYN ACK => FAR > FROMPOD\d+ tcp SYN ACK on veth-p1; ` +
				`service test/far, backend Q1, nat, reply`,
			// A pod to itself.
			`veth-p1 proxy: forward: FROMPOD\d+ > SELF tcp SYN => HAIRPIN\d+ > P1 tcp SYN on veth-p1; ` +
				`service test/self, backend P1, nat, request`,
			`veth-p1 proxy: forward: P1 > HAIRPIN\d+ tcp SYN ACK => SELF > FROMPOD\d+ tcp SYN ACK on veth-p1; ` +
				`service test/self, backend P1, nat, reply`,
			// This node.
			`sy0 proxy-out: forward: FROMNODE\d+ > DNS udp => \S+ > P2 udp on veth-p2; ` +
				`service test/dns, backend P2, nat, request`,
			`veth-p2 proxy: forward: P2 > \S+ udp => DNS > FROMNODE\d+ udp to the stack; ` +
				`service test/dns, backend P2, nat, reply`,
			// Another machine to a node port.
			`eth0 proxy: forward: FROMOUT\d+ > NODEPORT tcp SYN => FROMNODE\d+ > Q1 tcp SYN on eth0; ` +
				`service test/far, backend Q1, nat, request`,
			`eth0 proxy: forward: Q1 > FROMNODE\d+ tcp SYN ACK => NODEPORT > FROMOUT\d+ tcp SYN ACK on eth0; ` +
				`service test/far, backend Q1, nat, reply`,
			// Refused and dropped.
			`veth-p1 proxy: reset: FROMPOD\d+ > EMPTY tcp SYN => EMPTY > FROMPOD\d+ tcp RST ACK on veth-p1; ` +
				`service test/empty, no_backend: why`,
			`veth-p1 proxy: drop: FROMPOD\d+ > LOCAL tcp SYN; service test/local, no_local_backend: why`,
		} {
			has(t, lines, words, want)
		}
		only := func(filter lb.TraceFilter, pattern string) {
			t.Helper()
			lines, want := p.traced(filter, all), regexp.MustCompile(pattern)
			must.True(t, len(lines) > 0, "%+v: nothing", filter)
			for _, line := range lines {
				must.True(t, want.MatchString(line), "%+v selects\n%s", filter, line)
			}
		}
		only(lb.TraceFilter{Service: "test/far"}, "service test/far, backend")
		only(lb.TraceFilter{Service: "test/empty"}, "service test/empty, no_backend")
		only(lb.TraceFilter{VIP: vip(3, 53).Addr()}, "service test/dns, ")
		only(lb.TraceFilter{Client: outside}, regexp.QuoteMeta(port(outside))+`\d+`)
		only(lb.TraceFilter{Drops: true}, "; service test/(empty|local), no_")
	}
}

// A trace interrupts no connection, and leaves the programs as they were. If an agent dies during a trace, the next one
// replaces its programs.
func TestTraceChangesNothing(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	must.Get(traffic.ServeTCPEcho(n.pods["q1"].Host, "q1", n.pods["q1"].at(true, 9000)))(t)
	r := n.rule("a:echo", clusterIP(true, 1), 80, lb.TCP, "q1")
	r.Inside.Endpoints[0] = n.pods["q1"].at(true, 9000)
	p.apply(r)
	echo := netip.AddrPortFrom(clusterIP(true, 1), 80)
	conns := labtest.Connect(t, traffic.From(n.pods["p1"].Host), echo, 5)
	programs := func() (ids [3]int) {
		for i, at := range []struct {
			name   string
			parent uint32
		}{
			{"veth-p1", netlink.HANDLE_MIN_INGRESS}, {"veth-p1", netlink.HANDLE_MIN_EGRESS},
			{"sy0", netlink.HANDLE_MIN_EGRESS},
		} {
			must.Do(t, n.node.Do(func() error {
				l, err := netlink.LinkByName(at.name)
				if err != nil {
					return err
				}
				list, err := netlink.FilterList(l, at.parent)
				must.Need(t, len(list) == 1, "%s has %d filters", at.name, len(list))
				ids[i] = list[0].(*netlink.BpfFilter).Id
				return err
			}))
		}
		var published []int
		p.call("Published", true, &published)
		must.Equal(t, ids[:2], published) // or a watcher would undo a trace
		return ids
	}
	plain := programs()
	var during [3]int
	load := make(chan error, 1)
	url := fmt.Sprintf("http://%s/", netip.AddrPortFrom(clusterIP(true, 2), 80))
	p.apply(r, n.rule("b:http", clusterIP(true, 2), 80, lb.TCP, "p2"))
	go func() {
		load <- traffic.From(n.pods["b1"].Host).Load(t.Context(), traffic.Load{URL: url, Requests: 2000}).Err()
	}()
	for range 5 {
		p.traced(lb.TraceFilter{}, func() {
			during = programs()
			labtest.Exchange(t, conns, "during a trace")
		})
		must.Equal(t, plain, programs())
	}
	must.Do(t, <-load)
	for i := range plain {
		must.True(t, plain[i] != during[i], "program %d is attached during the trace", plain[i])
	}
	p.call("TraceBegin", lb.TraceFilter{}, new(bool))
	p.restart()
	for i, id := range programs() {
		must.True(t, id != during[i], "a program that traces is left")
	}
	labtest.Exchange(t, conns, "with the next agent")
}
