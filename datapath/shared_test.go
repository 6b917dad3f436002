package datapath

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// pool holds the fixtures that tests share, because the verifier takes a second for each fixture.
var pool = struct {
	sync.Mutex
	free map[string][]*fixture // unused ones, by their options
	labs []*lab.Lab
}{free: map[string][]*fixture{}}

// Tests run in parallel, each with its own hosts. Many of them wait, so two run per processor.
func TestMain(m *testing.M) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	for _, fixtures := range pool.free {
		for _, fx := range fixtures {
			fx.stopCalls()
			if err := fx.d.Close(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
			}
		}
	}
	for _, l := range pool.labs {
		if err := l.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// shared returns a fixture without services and flows for the exclusive use of the test. Tests that change the host or
// close its datapath need newFixture.
func shared(t *testing.T, h hookName, isV6 bool, change func(*Options)) *fixture {
	t.Helper()
	labtest.Root(t)
	fx := fromPool(t, change)
	fx.begin(t, h, isV6)
	d, before := fx.d, fx.hostState()
	t.Cleanup(func() {
		if fx.t = t; fx.d != d {
			t.Error("the test closed a datapath that others use")
			return
		}
		if diff := cmp.Diff(before, fx.hostState()); diff != "" {
			t.Errorf("the test changed a host that others use; before -, after +:\n%s", diff)
			return
		}
		pool.Lock()
		defer pool.Unlock()
		pool.free[optionsKey(fx.o)] = append(pool.free[optionsKey(fx.o)], fx)
	})
	return fx
}

func optionsKey(o Options) string { return fmt.Sprintf("%+v", o) }

func fromPool(t *testing.T, change func(*Options)) *fixture {
	t.Helper()
	o := testOptions()
	if change != nil {
		change(&o)
	}
	pool.Lock()
	defer pool.Unlock()
	if free := pool.free[optionsKey(o)]; len(free) > 0 {
		pool.free[optionsKey(o)] = free[:len(free)-1]
		return free[len(free)-1]
	}
	l := must.Get(lab.New())(t)
	pool.labs = append(pool.labs, l)
	fx := &fixture{t: t, lab: l, o: o}
	pool.Unlock()
	defer pool.Lock()
	fx.makeHost()
	fx.addressesSettled()
	fx.load()
	return fx
}

// begin restores the state of the datapath after Open.
func (fx *fixture) begin(t *testing.T, h hookName, isV6 bool) {
	t.Helper()
	fx.t, fx.hook, fx.v6 = t, h, isV6
	fx.reset()
	fx.clear("sy_snat_later")
	fx.d.flows.Limits = fx.o.Timeouts
	keys := TunnelKeys{}
	if fx.o.TunnelKeys != nil {
		keys = *fx.o.TunnelKeys
	}
	fx.do(func() error { return errors.Join(fx.d.SetTunnelSources(nil), fx.d.SetTunnelKeys(keys)) })
}

// hostState returns the state of a host that tests may change.
func (fx *fixture) hostState() (lines []string) {
	fx.t.Helper()
	fx.do(func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			a := l.Attrs()
			addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
			if err != nil {
				return err
			}
			lines = append(lines, fmt.Sprint(a.Name, a.Index, a.MTU, a.HardwareAddr, a.Flags, addrs))
		}
		every := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			routes, err1 := netlink.RouteListFiltered(family, every, netlink.RT_FILTER_TABLE)
			rules, err2 := netlink.RuleList(family)
			neighbours, err3 := netlink.NeighList(0, family)
			if err := errors.Join(err1, err2, err3); err != nil {
				return err
			}
			for _, r := range routes {
				lines = append(lines, r.String())
			}
			for _, r := range rules {
				lines = append(lines, r.String())
			}
			for _, n := range neighbours {
				if n.State == netlink.NUD_PERMANENT {
					lines = append(lines, n.String())
				}
			}
		}
		return nil
	})
	for _, pin := range fx.pinned() {
		if !strings.Contains(pin, "/chunks/") { // services add chunks
			lines = append(lines, pin)
		}
	}
	slices.Sort(lines)
	return lines
}

// Maps that reset does not clear.
var (
	// Services add entries to these and remove them.
	serviceMaps = []string{"sy_frontends", "sy_port_ranges", "sy_src_allow", "sy_weights", "sy_ended", "sy_vips"}
	// The host, the options, or ids that the services keep determine the entries of these. An entry in sy_snat_later
	// costs a lookup but changes no verdict.
	keptMaps = []string{"sy_addr_filter", "sy_backends", "sy_be_counters", "sy_be_handshakes", "sy_fe_counters",
		"sy_frontend_vips", "sy_local_addrs", "sy_next_hops", "sy_progs", "sy_scratch", "sy_servers", "sy_slots",
		"sy_snat_later", "sy_snat_ports", "sy_tunnel_keys", "sy_tunnel_src", "sy_uplinks"}
	// Arrays indexed by id, of which tests use the first elements. The last element is the sum.
	idMaps = []string{"sy_backend_load", "sy_relay_share", "sy_udp_share"}
)

// reset removes all services, flows, counters and hints. It clears each map that is not named above.
func (fx *fixture) reset() {
	fx.t.Helper()
	held := must.Get(fx.d.Held())(fx.t)
	fx.last = dptest.Packet{}
	fx.apply(lb.Delta{Delete: held})
	fx.clear("sy_halfopen_clients", "sy_halfopen_servers", "sy_stream_clients", "sy_stream_servers", "sy_udp_clients",
		"sy_udp_servers", "sy_dsr_flows", "sy_dsr_halfopen", "sy_relays")
	fx.forget()
	for _, m := range fx.maps() {
		switch {
		case slices.Contains(serviceMaps, m.name):
			n := m.entries(fx.t)
			must.Need(fx.t, n == 0, "%s has %d entries without a service", m.name, n)
		case !slices.Contains(keptMaps, m.name):
			m.clear(fx.t)
		}
	}
	fx.do(func() error { return errors.Join(fx.d.flows.Resume(true), fx.d.services.SetLoads(nil)) })
}

func (fx *fixture) clear(names ...string) {
	fx.t.Helper()
	for _, m := range fx.maps() {
		if slices.Contains(names, m.name) {
			m.clear(fx.t)
		}
	}
}

type namedMap struct {
	*ebpf.Map
	name string
}

func (fx *fixture) maps() (all []namedMap) {
	fields := reflect.ValueOf(fx.d.objects.SyMaps)
	for i := range fields.NumField() {
		if m, ok := fields.Field(i).Interface().(*ebpf.Map); ok {
			all = append(all, namedMap{m, fields.Type().Field(i).Tag.Get("ebpf")})
		}
	}
	return all
}

// clear deletes the entries of a hash table, and zeroes the elements of an array.
func (m namedMap) clear(t *testing.T) {
	t.Helper()
	switch m.Type() {
	case ebpf.Array:
		keys := make([]uint32, m.MaxEntries())
		if slices.Contains(idMaps, m.name) {
			keys = keys[:1024]
		}
		for i := range keys {
			keys[i] = uint32(i)
		}
		keys[len(keys)-1] = m.MaxEntries() - 1
		value := reflect.ArrayOf(int(m.ValueSize()), reflect.TypeFor[byte]())
		zero := reflect.MakeSlice(reflect.SliceOf(value), len(keys), len(keys)).Interface()
		_, err := m.BatchUpdate(keys, zero, nil)
		must.Need(t, err == nil, "clear %s: %v", m.name, err)
	case ebpf.PerCPUArray:
		zero := make([][]byte, ebpf.MustPossibleCPU())
		for i := range zero {
			zero[i] = make([]byte, m.ValueSize())
		}
		for i := range m.MaxEntries() {
			err := m.Put(i, zero)
			must.Need(t, err == nil, "clear %s: %v", m.name, err)
		}
	default:
		for _, k := range m.keys(t) {
			if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // LRU maps evict
				t.Fatalf("clear %s: %v", m.name, err)
			}
		}
	}
}

func (m namedMap) keys(t *testing.T) (keys [][]byte) {
	t.Helper()
	var key, value []byte
	all := m.Iterate()
	for all.Next(&key, &value) {
		keys = append(keys, slices.Clone(key))
	}
	err := all.Err()
	must.Need(t, err == nil, "read %s: %v", m.name, err)
	return keys
}

func (m namedMap) entries(t *testing.T) int {
	t.Helper()
	return len(m.keys(t))
}
