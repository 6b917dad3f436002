package file

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// sink records its calls.
type sink struct{ calls []string }

func (s *sink) Put(svc *lb.Service) {
	s.calls = append(s.calls, fmt.Sprintf("put %s %v", svc.Name, svc.VIPs))
}
func (s *sink) Delete(name string)     { s.calls = append(s.calls, "delete "+name) }
func (s *sink) Complete(source string) { s.calls = append(s.calls, "complete "+source) }

func parse(t *testing.T, text string) *config.Config {
	t.Helper()
	return must.Get(config.Parse("test.toml", []byte(text)))(t)
}

const pool = "[bgp]\nasn = 64512\n[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.1-203.0.113.2\"]\n"

func fixed(name, vip, backend string) string {
	return fmt.Sprintf("[[service]]\nname = %q\naddress = %q\nports = [\"80\"]\nbackends = [%q]\n", name, vip, backend)
}

func pooled(name string) string {
	return fmt.Sprintf("[[service]]\nname = %q\npool = \"p\"\nports = [\"80\"]\nbackends = [\"10.0.0.1\"]\n", name)
}

func TestSourceSendsTheDifference(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, out := New(nil, nil), &sink{}
		must.Run(t, func(ctx context.Context) error { return s.Run(ctx, out) })
		for _, step := range []struct {
			text string
			want []string
		}{
			{pool + fixed("a", "203.0.113.1", "10.0.0.1") + pooled("b"), []string{
				"put a [203.0.113.1]", "put b [203.0.113.2]", "complete file",
			}},
			{pool + pooled("b") + fixed("a", "203.0.113.1", "10.0.0.1"), []string{"complete file"}},
			{pool + pooled("b") + fixed("a", "203.0.113.1", "10.0.0.2"), []string{
				"put a [203.0.113.1]", "complete file",
			}},
			{pool + pooled("b"), []string{"delete a", "complete file"}},
			{pool + pooled("c") + pooled("b"), []string{"put c [203.0.113.1]", "complete file"}},
		} {
			out.calls = nil
			must.Do(t, s.Use(parse(t, step.text)))
			synctest.Wait()
			must.Equal(t, step.want, out.calls)
		}
	})
}

// Of a service that has not changed only one copy is kept, whether or not its text was decoded again.
func TestOneCopyOfAnUnchangedService(t *testing.T) {
	t.Parallel()
	text := pool + fixed("a", "198.51.100.1", "10.0.0.1") + pooled("b")
	text = strings.Replace(text, "\"203.0.113.1-", "\"198.51.100.1\", \"203.0.113.1-", 1)
	s := New(nil, nil)
	cfg := parse(t, text)
	must.Do(t, s.Use(cfg))
	before := s.services
	for name, again := range map[string]*config.Config{
		"decoded again": parse(t, text),
		"not decoded":   must.Get(config.ParseAfter(cfg, "test.toml", []byte(text)))(t),
	} {
		p := must.Get(s.Plan(again))(t)
		for i, svc := range p.services {
			must.True(t, svc == before[i] && &again.Services[i].Backends[0] == &svc.Ports[0].Backends[0],
				"%s: %s was copied", name, svc.Name)
		}
	}
}

func TestUseRefusesAsAWhole(t *testing.T) {
	s := New(nil, nil)
	err := s.Use(parse(t, pool+pooled("a")+pooled("b")+pooled("c")))
	must.Equal(t, `service "c": no free IPv4 address in p`, fmt.Sprint(err))
	must.True(t, len(s.next) == 0, "a refused configuration was passed on")
}

func TestFixedAddressesAreNotAssigned(t *testing.T) {
	cfg := parse(t, pool+pooled("a")+fixed("b", "203.0.113.1", "10.0.0.1"))
	services, _, errs := translate(cfg, lb.NewAllocator(nil))
	must.Equal(t, nil, errs)
	must.Equal(t, []netip.Addr{netip.MustParseAddr("203.0.113.2")}, services[0].VIPs)
}

// The ports of a service share one list of backends, keep the order of the file, and the policy is Cluster.
func TestTranslatedShape(t *testing.T) {
	services, _, errs := translate(parse(t, pool+"[[service]]\nname = \"dns\"\naddress = \"203.0.113.1\"\n"+
		"ports = [\"53/udp\", \"80:8080\"]\nbackends = [\"10.0.0.1\", \"10.0.0.2\"]\n"), lb.NewAllocator(nil))
	must.Equal(t, nil, errs)
	s := services[0]
	must.Need(t, len(s.Ports) == 2 && s.Ports[0].Name() == "53/udp" && s.Ports[1].Name() == "80/tcp",
		"ports %+v; want 53/udp and 80/tcp", s.Ports)
	if a, b := s.Ports[0].Backends, s.Ports[1].Backends; len(a) != 2 || &a[0] != &b[0] || len(a) != len(b) {
		t.Errorf("backends %v and %v; want one shared list of two", a, b)
	}
	must.Equal(t, s.Ports[1].Port, s.Check.ServicePort)
	must.True(t, s.Policy == lb.PolicyCluster && !s.KeepSource,
		"policy %q, the source is kept: %t; want Cluster, and not", s.Policy, s.KeepSource)
	services, _, errs = translate(parse(t, pool+"[[service]]\nname = \"dns\"\naddress = \"203.0.113.1\"\n"+
		"ports = [\"80\"]\nbackends = [\"10.0.0.1\"]\nsnat = false\n"), lb.NewAllocator(nil))
	must.True(t, errs == nil && services[0].KeepSource,
		"with snat = false: %v; want a service that keeps the source", errs)
}

// A service keeps its address when the file is read again and another service names the same address.
func TestAssignedAddressesStay(t *testing.T) {
	_, alloc, errs := translate(parse(t, pool+pooled("a")+pooled("b")), lb.NewAllocator(nil))
	must.Equal(t, nil, errs)
	had := alloc.Given("b")[0]
	services, _, errs := translate(parse(t, pool+fixed("c", had.String(), "10.0.0.1")+pooled("b")), alloc)
	must.Equal(t, nil, errs)
	must.Equal(t, []netip.Addr{had}, services[1].VIPs)
}

// A service has an address of each family that its pool has and that a backend serves.
func TestFamiliesOfAService(t *testing.T) {
	dual := pool + "[[pool]]\nname = \"d\"\n" +
		"addresses = [\"198.51.100.1-198.51.100.2\", \"2001:db8::1-2001:db8::2\"]\n" +
		"[[pool]]\nname = \"r\"\naddresses = [\"2001:db8:4::/127\"]\n"
	service := func(pool, backends, more string) string {
		const text = "[[service]]\nname = \"a\"\npool = %q\nports = [\"80\"]\nbackends = [%s]\n%s"
		return fmt.Sprintf(text, pool, backends, more)
	}
	for _, tt := range []struct {
		name, text, want string
	}{
		{"both", service("d", `"10.0.0.1", "fd00::1"`, ""), "[198.51.100.2 2001:db8::2]"},
		{"backends of one family", service("d", `"10.0.0.1"`, ""), "[198.51.100.2]"},
		{"a tunnel carries both", service("d", `"10.0.0.1"`, "forward = \"tunnel\"\n"), "[198.51.100.2 2001:db8::2]"},
		{"no address of routers", service("r", `"fd00::1"`, ""), "[2001:db8:4::1]"},
		{"a pool of one family", service("p", `"10.0.0.1"`, "forward = \"tunnel\"\n"), "[203.0.113.2]"},
	} {
		services, _, errs := translate(parse(t, "[l2]\n"+dual+tt.text), lb.NewAllocator(nil))
		if errs != nil {
			t.Errorf("%s: %v", tt.name, errs)
			continue
		}
		must.Row(t, tt.name, tt.want, fmt.Sprint(services[0].VIPs))
	}
}

// A service has an address for each member, from what the other services leave, including after a member is added.
func TestAddressPerNode(t *testing.T) {
	const head = "[l2]\nunencrypted = true\nmembers = [%s]\n[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/29\"]\n"
	s := New(nil, nil)
	var had []netip.Addr
	for i, members := range []string{
		`"192.0.2.2", "192.0.2.3"`, `"192.0.2.2", "192.0.2.3", "192.0.2.4"`, `"192.0.2.2"`,
	} {
		text := fmt.Sprintf(head, members) + pooled("a") + "address_per_node = true\n" + pooled("b") + pooled("c")
		must.Do(t, s.Use(parse(t, text)))
		services := (<-s.next).services
		got := services[0].VIPs
		n := min(len(got), len(had))
		must.True(t, len(got) == []int{3, 4, 2}[i] && slices.Equal(got[:n], had[:n]) && services[0].VIPPerNode,
			"with members %s: %v, before: %v", members, got, had)
		had = got
	}
	// Five others need an address each, and their names come later.
	text := fmt.Sprintf(head, `"192.0.2.2", "192.0.2.3", "192.0.2.4"`) + pooled("a") + "address_per_node = true\n"
	for i := range 5 {
		text += pooled(fmt.Sprintf("b%d", i))
	}
	s = New(nil, nil)
	must.Do(t, s.Use(parse(t, text)))
	got := (<-s.next).services[0].VIPs
	must.True(t, len(got) == 3, "%v of a pool of eight addresses beside five other services", got)
}

// Services of two machines get the same addresses, whatever the order of their files is.
func TestAddressesDoNotDependOnTheOrder(t *testing.T) {
	const head = "[bgp]\nasn = 64512\n[[pool]]\nname = \"p\"\naddresses = [%s]\n"
	names := []string{"a", "b", "c", "web", "mail", "dns"}
	for _, ranges := range []string{`"203.0.113.0/29"`, `"10.0.0.0/8"`, `"203.0.113.0/30", "198.51.100.0/30"`} {
		var first map[string]string
		for _, order := range [][]int{{0, 1, 2, 3, 4, 5}, {5, 4, 3, 2, 1, 0}, {2, 5, 0, 3, 1, 4}} {
			text := fmt.Sprintf(head, ranges)
			for _, i := range order {
				text += pooled(names[i])
			}
			services, _, errs := translate(parse(t, text), lb.NewAllocator(nil))
			must.Need(t, errs == nil, "%v", errs)
			got, taken := map[string]string{}, map[string]bool{}
			for _, s := range services {
				got[s.Name] = fmt.Sprint(s.VIPs)
				taken[fmt.Sprint(s.VIPs)] = true
			}
			if first == nil {
				first = got
			}
			must.True(t, maps.Equal(got, first) && len(taken) == len(names),
				"%s, order %v: %v; want %v", ranges, order, got, first)
		}
	}
}

// memory is a Store.
type memory struct{ saved Assigned }

func (m *memory) Save(a Assigned) { m.saved = a }

// A service keeps its address when the agent starts again, even if services that come before it are added.
func TestAddressesOutliveTheAgent(t *testing.T) {
	for _, name := range []string{"a", "b", "c", "d"} {
		store := &memory{}
		must.Do(t, New(nil, store).Use(parse(t, pool+pooled(name))))
		had := store.saved
		must.Need(t, len(had) == 1 && len(had[name]) == 1, "saved %v", had)
		for _, other := range []string{"a", "b", "c", "d"} {
			if other == name {
				continue
			}
			must.Do(t, New(had, store).Use(parse(t, pool+pooled(other)+pooled(name))))
			must.Row(t, name, had[name], store.saved[name])
			must.True(t, !slices.Equal(store.saved[other], had[name]), "%s has what %s had", other, name)
		}
	}
}
