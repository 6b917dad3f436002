package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// many returns a file with services n to m-1, each with the address of its number plus shift.
func many(n, m, shift int) string {
	text := "[l2]\n"
	for i := n; i < m; i++ {
		text += fmt.Sprintf("[[service]]\nname = \"s%02d\"\naddress = \"203.0.113.%d\"\nports = [\"80\"]\n"+
			"backends = [\"10.0.0.1\"]\ncheck = \"none\"\n", i, i+1+shift)
	}
	return text
}

func TestGuard(t *testing.T) {
	for _, tt := range []struct {
		name, from, to string
		want           string // part of the error, or ""
	}{
		{"half is removed", many(0, 20, 0), many(0, 10, 0), ""},
		{"more than half is removed", many(0, 20, 0), many(0, 9, 0), "11 of 20 services would be removed: s09, s10,"},
		{"two of two", many(0, 2, 0), many(8, 9, 0), ""},
		{"cut off", many(0, 20, 0), strings.TrimSpace(many(0, 19, 0)),
			"does not end with a newline, as if truncated, and lacks 1 of 20 services: s19;"},
		{"an editor that ends no line", many(0, 20, 0), strings.TrimSpace(many(0, 21, 0)), ""},
		{"it never ended its lines", strings.TrimSpace(many(0, 20, 0)), strings.TrimSpace(many(0, 19, 0)), ""},
		{"two of twenty move", many(0, 20, 0), many(0, 18, 0) + many(18, 20, 20)[len("[l2]\n"):], ""},
		{"three of twenty move", many(0, 20, 0), many(0, 17, 0) + many(17, 20, 20)[len("[l2]\n"):],
			"3 of 20 services would lose an address: s17, s18, s19;"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, _ := newTestReloader(t, new(slog.LevelVar), discard)
			for _, text := range []string{"[l2]\n", tt.from} {
				writeConfig(t, l.file, text)
				must.Get(l.reload(""))(t)
			}
			then, err := l.diff("/x.toml", []byte(tt.to))
			warned := strings.Contains(fmt.Sprint(then.Warnings), "a reload would refuse this")
			must.True(t, err == nil && warned == (tt.want != ""), "diff: %v, warnings %q", err, then.Warnings)
			writeConfig(t, l.file, tt.to)
			_, err = l.reload("")
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("reload: %v; want %q", err, tt.want)
			}
			if err == nil {
				return
			}
			_, word, _ := strings.Cut(err.Error(), "--force ")
			word, _, _ = strings.Cut(word, ",")
			_, err = l.reload("0000")
			must.True(t, err != nil, "another word allows the change")
			if tt.name == "cut off" { // with the command
				must.Get(l.reload(word))(t)
				return
			}
			writeConfig(t, l.file, fmt.Sprintf("force = %q\n", word)+tt.to)
			must.Get(l.reload(""))(t)
		})
	}
}

// withPool is a file with a pool for Services of a cluster.
const withPool = "[l2]\n[kubernetes]\nkubeconfig = \"/x\"\n[[pool]]\nname = \"p\"\naddresses = [%q]\n"

// Services of the cluster count by their addresses in pools: those that clients use or, if there are none, all.
func TestGuardOfTheCluster(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	l.loaded, l.started = parse(t, fmt.Sprintf(withPool, "203.0.113.0/28")), time.Time{}
	var used int // the first ones
	l.status = func(context.Context) (st lb.Status, err error) {
		for i := range 4 {
			st.Services = append(st.Services, lb.ServiceStatus{
				Service: fmt.Sprint("ns/s", i), Address: netip.AddrFrom4([4]byte{203, 0, 113, byte(i + 1)}),
			})
			if i < used {
				st.Services[i].Last = time.Now().Add(time.Minute - usedFor)
			}
		}
		return st, nil
	}
	const all = "4 of 5 services would lose an address: ns/s0, ns/s1, ns/s2, ns/s3;"
	for _, tt := range []struct {
		pool string
		used int
		want string
	}{
		{"203.0.113.0/28", 0, ""}, {"203.0.113.2/31", 0, ""}, {"198.51.100.0/28", 0, all},
		{"198.51.100.0/28", 2, ""}, {"198.51.100.0/28", 3, all},
	} {
		cfg := parse(t, fmt.Sprintf(withPool, tt.pool))
		cfg.Services, used = parse(t, webTOML).Services, tt.used
		_, err := l.permit(cfg, "")
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}

// A start with a file that a reload would refuse continues with the last active one, and says so.
func TestGuardAtTheStart(t *testing.T) {
	dir := t.TempDir()
	for _, tt := range []struct {
		text, inForce string
		refused       bool
	}{
		{many(0, 20, 0), many(0, 20, 0), false}, {many(0, 3, 0), many(0, 20, 0), true},
		{many(0, 12, 0), many(0, 12, 0), false}, {many(0, 9, 0), many(0, 9, 0), false},
	} {
		a, _, err := newInMemory(t, tt.text, func(o *Options) { o.KeepDir = dir })
		must.Do(t, err)
		st := a.reloader.state.Load()
		must.True(t, strings.HasSuffix(st.text, tt.inForce) && (st.refused != "") == tt.refused &&
			len(a.reloader.findings()) == 0,
			"in force is\n%s\nrefused: %q, findings %v", st.text, st.refused, a.reloader.findings())
	}
	// The cluster's Services count as the last agent knew them.
	before := fmt.Sprintf(withPool, "203.0.113.0/28")
	o := Options{KeepDir: t.TempDir(), Log: discard, Config: parse(t, fmt.Sprintf(withPool, "203.0.113.64/28"))}
	must.Do(t, historyOf(o).Add(before, time.Now()))
	must.Do(t, clusterFile(o.KeepDir).Save(clusterState{Services: []*lb.Service{
		stored("a/x"), stored("a/y"), stored("a/z"),
	}}))
	cfg, refused, err := chooseStart(o, file.New(nil, nil))
	must.True(t, err == nil && cfg.Text == before && strings.Contains(fmt.Sprint(refused),
		"3 of 3 services would lose an address: a/x, a/y, a/z;"), "%v: started with\n%s\nrefused: %v",
		err, cfg.Text, refused)
}

// collector is a sink that keeps the services.
type collector struct {
	services []*lb.Service
	complete context.CancelFunc
}

func (c *collector) Put(s *lb.Service) { c.services = append(c.services, s) }
func (c *collector) Delete(string)     {}
func (c *collector) Complete(string)   { c.complete() }

// checkRails fails the test if a valid configuration announces anything but addresses of its pools. With BGP the whole
// prefix must be in pools.
func checkRails(t *testing.T, text string) (valid bool) {
	t.Helper()
	cfg, err := config.Parse("test.toml", []byte(text))
	if err != nil {
		return false
	}
	source := file.New(nil, nil)
	if source.Use(cfg) != nil {
		return false
	}
	ctx, cancel := context.WithCancel(t.Context())
	got := &collector{complete: cancel}
	must.Do(t, source.Run(ctx, got))
	o := bgpOptions(cfg, facts, nil)
	poolOf := func(a netip.Addr) int {
		return slices.IndexFunc(cfg.Pools, func(p config.Pool) bool { return p.Contains(a) })
	}
	for _, s := range got.services {
		for _, vip := range s.VIPs {
			i := poolOf(vip)
			must.Need(t, i >= 0, "%s of %s is in no pool of\n%s", vip, s.Name, text)
			p := cfg.Pools[i]
			by := s.Announce
			must.Need(t, slices.Equal(by, p.Announce), "%s of %s is announced by %v of\n%s", vip, s.Name, by, text)
			if len(p.Announce) > 0 && !slices.Contains(p.Announce, lb.AnnounceBGP) {
				continue
			}
			bits := cmp.Or(p.AggregateV6, o.AggregateV6)
			if vip.Is4() {
				bits = cmp.Or(p.AggregateV4, o.AggregateV4)
			}
			prefix := netip.PrefixFrom(vip, bits).Masked()
			must.Need(t, prefix.Bits() >= 8, "%s is announced of\n%s", prefix, text)
			for a := prefix.Addr(); prefix.Contains(a); a = a.Next() {
				must.Need(t, poolOf(a) >= 0, "%s is announced and has %s, which is in no pool of\n%s", prefix, a, text)
			}
		}
	}
	return true
}

// Only addresses of pools are ever announced, whatever valid configuration there is. Most addresses are near the ends
// of pools, and most prefix lengths near the pools' lengths.
func TestRails(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(12, 12))
	address := func() string {
		if rng.IntN(3) == 0 {
			return fmt.Sprintf("2001:db8::%x", rng.IntN(64))
		}
		return fmt.Sprintf("203.0.113.%d", rng.IntN(64))
	}
	ranged := func() string {
		switch rng.IntN(4) {
		case 0:
			return fmt.Sprintf("203.0.113.%d/%d", rng.IntN(8)*8, 28+rng.IntN(5))
		case 1:
			return fmt.Sprintf("2001:db8::%x/%d", rng.IntN(8)*8, 124+rng.IntN(5))
		case 2:
			return fmt.Sprintf("203.0.113.%d-203.0.113.%d", rng.IntN(64), rng.IntN(64))
		}
		return address()
	}
	lengths := func() (lines string) {
		if rng.IntN(2) == 0 {
			lines += fmt.Sprintf("aggregate_v4 = %d\n", 27+rng.IntN(6))
		}
		if rng.IntN(2) == 0 {
			lines += fmt.Sprintf("aggregate_v6 = %d\n", 123+rng.IntN(6))
		}
		return lines
	}
	valid := 0
	for range 8000 {
		var b strings.Builder
		fmt.Fprintf(&b, "[l2]\n[bgp]\nasn = 64512\n%s", lengths())
		for n := range 1 + rng.IntN(3) {
			fmt.Fprintf(&b, "[[pool]]\nname = \"p%d\"\naddresses = [%q, %q]\n", n, ranged(), ranged())
			if rng.IntN(3) == 0 {
				b.WriteString(lengths())
			}
			if rng.IntN(3) == 0 {
				fmt.Fprintf(&b, "announce = [%q]\n", lb.AnnouncerKinds[rng.IntN(len(lb.AnnouncerKinds))])
			}
		}
		for n := range 1 + rng.IntN(3) {
			fmt.Fprintf(&b, "[[service]]\nname = \"s%d\"\nports = [\"%d\"]\nforward = \"tunnel\"\n", n, 80+n)
			b.WriteString("backends = [\"10.0.0.1\", \"fd00::1\"]\n")
			if rng.IntN(2) == 0 {
				fmt.Fprintf(&b, "address = [%q, %q]\n", address(), address())
			} else {
				fmt.Fprintf(&b, "pool = \"p%d\"\naddress_per_node = %t\n", rng.IntN(3), rng.IntN(2) == 0)
			}
		}
		if checkRails(t, b.String()) {
			valid++
		}
	}
	must.True(t, valid >= 50, "only %d configurations were valid", valid)
	t.Logf("%d configurations were valid", valid)
}
