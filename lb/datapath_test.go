package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var (
	testStart = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	errTest   = errors.New("injected")
)

// testPlan returns the plan of a service at these ports of testVIP, each with n targets.
func testPlan(name string, n int, ports ...uint16) *Plan {
	p := &Plan{Service: &Service{Name: name}, VIPs: []VIPPlan{{VIP: testVIP, Healthy: n}}}
	for _, port := range ports {
		p.Frontends = append(p.Frontends, &FrontendPlan{Frontend: at(port), Service: name, Targets: equalWeights(n)})
	}
	return p
}

func at(port uint16) Frontend { return Frontend{VIP: testVIP, Port: port, Protocol: TCP} }

// deltaText returns a phrase such as "+80 +81 -82".
func deltaText(d Delta) string {
	var out []string
	for _, p := range d.Put {
		out = append(out, fmt.Sprintf("+%d", p.Port))
	}
	for _, f := range d.Delete {
		out = append(out, fmt.Sprintf("-%d", f.Port))
	}
	return strings.Join(out, " ")
}

func newTestState(held ...Frontend) *datapathState {
	return newDatapathState(&vipTable{byAddr: map[vipKey]*vip{}}, held, time.Second, func(string, int) {})
}

// step takes the next delta, which must be want, and completes it with errors for the failed ports.
func (d *datapathState) step(t *testing.T, now time.Time, want string, failed ...uint16) {
	t.Helper()
	delta, ok := d.next(now, true)
	got := deltaText(delta)
	must.Need(t, got == want && ok == (want != ""), "delta %q, %t; want %q", got, ok, want)
	if !ok {
		return
	}
	again, ok := d.next(now, true)
	must.Need(t, !ok, "delta %q while a call is in flight", deltaText(again))
	errs := map[Frontend]error{}
	for _, port := range failed {
		errs[at(port)] = errTest
	}
	d.complete(delta, errs, now)
}

func (d *datapathState) held() (ports []uint16) {
	for f, s := range d.frontends {
		if s.held {
			ports = append(ports, f.Port)
		}
	}
	slices.Sort(ports)
	return ports
}

// Frontends of an old plan that the next one lacks are removed; other services' frontends and the remaining ones are
// not.
func TestDatapathStateDrop(t *testing.T) {
	for _, tt := range []struct {
		name    string
		next    *Plan
		dropped bool
		want    []uint16
	}{
		{"no next plan", nil, true, []uint16{90}},
		{"the same ports", testPlan("web", 1, 80, 81), false, []uint16{80, 81, 90}},
		{"the first port stays, the second goes", testPlan("web", 1, 80), true, []uint16{80, 90}},
		{"the first port goes, the second stays", testPlan("web", 1, 81), true, []uint16{81, 90}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newTestState()
			old, other := testPlan("web", 1, 80, 81, 90), testPlan("other", 1, 90)
			must.Equal(t, nil, d.want(other))
			must.Equal(t, []Frontend{at(90)}, d.want(old))
			d.step(t, testStart, "+80 +81 +90")
			if tt.next != nil {
				d.want(tt.next)
			}
			must.Equal(t, tt.dropped, d.drop(old, tt.next))
			delta, _ := d.next(testStart, true)
			d.complete(delta, nil, testStart)
			must.Equal(t, tt.want, d.held())
			must.Equal(t, len(tt.want), d.vips.get(testVIP).wanted)
		})
	}
}

// A failed frontend is retried alone after Retry, which doubles up to 32 times; a new plan is tried immediately.
func TestDatapathStateRetries(t *testing.T) {
	d, now := newTestState(), testStart
	d.want(testPlan("web", 1, 80, 81))
	d.step(t, now, "+80 +81", 81)
	must.Equal(t, []uint16{80}, d.held())
	for _, delay := range []time.Duration{1, 2, 4, 8, 16, 32, 32} {
		delay *= time.Second
		if got := d.retryAt(); !got.Equal(now.Add(delay)) {
			t.Fatalf("retry after %s; want %s", got.Sub(now), delay)
		}
		must.True(t, d.reason(at(81)) == errTest.Error() && d.reason(at(80)) == "",
			"reasons %q and %q; want one for port 81", d.reason(at(80)), d.reason(at(81)))
		d.step(t, now.Add(delay-1), "")
		must.True(t, d.idle(now.Add(delay-1)), "not idle before the retry is due")
		must.True(t, !d.idle(now.Add(delay)), "idle when the retry is due")
		got := d.behind
		must.True(t, got.Equal(testStart), "behind since %s; want %s", got, testStart)
		now = now.Add(delay)
		d.step(t, now, "+81", 81)
	}
	d.want(testPlan("web", 2, 81))
	d.step(t, now, "+81")
	d.step(t, now, "")
	must.True(t, d.behind.IsZero() && d.retryAt().IsZero() && d.reason(at(81)) == "",
		"behind since %s, retry at %s, reason %q; want none", d.behind, d.retryAt(), d.reason(at(81)))
}

// A plan equal to the applied one is not a delta; another one is.
func TestDatapathStateAppliesChangesOnly(t *testing.T) {
	d := newTestState()
	d.want(testPlan("web", 1, 80))
	d.step(t, testStart, "+80")
	d.want(testPlan("web", 1, 80))
	d.step(t, testStart, "")
	d.want(testPlan("web", 2, 80))
	d.step(t, testStart, "+80")
}

// Frontends of an earlier run stay until the engine has settled and no announcer can still announce their VIP.
func TestDatapathStateOfAnEarlierRun(t *testing.T) {
	d := newTestState(at(80), at(81))
	v := d.vips.get(testVIP)
	must.Need(t, v.held == 2 && v.serving == 2 && v.datapath.Surely() && v.announce.Surely(),
		"VIP %+v; want served and announced", v)
	if delta, ok := d.next(testStart, false); ok {
		t.Fatalf("delta %q before the engine has settled", deltaText(delta))
	}
	delta, _ := d.next(testStart, true)
	must.Need(t, len(delta.Delete) == 1,
		"delta %q; want one frontend deleted: the last one of an announced VIP stays", deltaText(delta))
	d.complete(delta, nil, testStart)
	if delta, ok := d.next(testStart, true); ok {
		t.Fatalf("delta %q while the VIP is announced", deltaText(delta))
	}
	v.announce = Known{}
	delta, _ = d.next(testStart, true)
	d.complete(delta, nil, testStart)
	must.True(t, len(d.held()) == 0, "held %v after the withdrawal; want none", d.held())
	d.next(testStart, true)
	must.True(t, len(d.vips.byAddr) == 0, "VIPs %v; want none", d.vips.byAddr)
}

// While a call is in flight a VIP is surely served only if that does not depend on the outcome.
func TestDatapathStateInFlight(t *testing.T) {
	for _, tt := range []struct {
		name      string
		now, next *Plan
		surely    bool
	}{
		{"first frontend", nil, testPlan("web", 1, 80), false},
		{"other targets", testPlan("web", 1, 80), testPlan("web", 2, 80), true},
		{"no targets left", testPlan("web", 1, 80), testPlan("web", 0, 80), false},
		{"targets again", testPlan("web", 0, 80), testPlan("web", 1, 80), false},
		{"no targets left, another frontend has some", testPlan("web", 1, 80, 81), &Plan{
			Service: &Service{Name: "web"}, Frontends: testPlan("web", 0, 80).Frontends,
		}, true},
		{"a second frontend", testPlan("web", 1, 80), testPlan("web", 1, 80, 81), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newTestState()
			if tt.now != nil {
				d.want(tt.now)
				delta, _ := d.next(testStart, true)
				d.complete(delta, nil, testStart)
			}
			d.want(tt.next)
			delta, ok := d.next(testStart, true)
			must.Need(t, ok && !d.idle(testStart), "delta: %t, idle: %t; want a call in flight", ok, d.idle(testStart))
			v := d.vips.get(testVIP)
			must.Equal(t, tt.surely, v.datapath.Surely())
			d.complete(delta, nil, testStart)
			d.step(t, testStart, "")
			must.True(t, d.idle(testStart) && !v.datapath.Busy && v.datapath.Done == (v.serving > 0),
				"after the call: idle %t, %+v, %d serving", d.idle(testStart), v.datapath, v.serving)
		})
	}
}

func TestVIPsAreOfOneTable(t *testing.T) {
	table := &vipTable{byAddr: map[vipKey]*vip{}}
	v := table.get(testVIP)
	must.True(t, table.get(testVIP) == v && table.get(netip.MustParseAddr("203.0.113.99")) != v,
		"an entry is not of its address")
	for _, busy := range []vip{{wanted: 1}, {held: 1}, {announce: Known{Done: true}}, {datapath: Known{Done: true}}} {
		busy.addr = testVIP
		table.byAddr[testVIP] = &busy
		table.forget(&busy)
		must.True(t, table.byAddr[testVIP] != nil, "%+v was forgotten", busy)
	}
	idle := &vip{addr: testVIP}
	table.byAddr[testVIP] = idle
	table.forget(idle)
	must.True(t, table.byAddr[testVIP] == nil, "an unused entry was not forgotten")
}
