package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// many is a file with services n to m-1, each with the address of its number plus shift.
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
		want           string // part of the error; "": none
	}{
		{"half is removed", many(0, 20, 0), many(0, 10, 0), ""},
		{"more than half is removed", many(0, 20, 0), many(0, 9, 0), "11 of 20 services would be removed: s09, s10,"},
		{"two of two", many(0, 2, 0), many(8, 9, 0), ""},
		{"cut off", many(0, 20, 0), strings.TrimSpace(many(0, 19, 0)),
			"ends without a newline, as one that was cut off, and lacks 1 of 20 services: s19;"},
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
			if warned := strings.Contains(fmt.Sprint(then.Warnings), "a reload refuses this"); err != nil ||
				warned != (tt.want != "") {
				t.Errorf("diff: %v, warnings %q", err, then.Warnings)
			}
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
			if _, err := l.reload("0000"); err == nil {
				t.Error("another word allows the change")
			}
			writeConfig(t, l.file, fmt.Sprintf("force = %q\n", word)+tt.to)
			must.Get(l.reload(""))(t)
		})
	}
}

// The word given with the command also allows the change.
func TestGuardByCommand(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	writeConfig(t, l.file, many(0, 20, 0))
	must.Get(l.reload(""))(t)
	writeConfig(t, l.file, many(0, 1, 0))
	_, err := l.reload("")
	if err == nil {
		t.Fatal("nothing is refused")
	}
	_, word, _ := strings.Cut(err.Error(), "--force ")
	word, _, _ = strings.Cut(word, ",")
	if _, err := l.reload(word); err != nil {
		t.Errorf("reload --force %s: %v", word, err)
	}
}

// Services of the cluster count by their addresses in pools.
func TestGuardOfTheCluster(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	const head = "[l2]\n[kubernetes]\nkubeconfig = \"/x\"\n[[pool]]\nname = \"p\"\naddresses = [%q]\n"
	l.loaded = parse(t, fmt.Sprintf(head, "203.0.113.0/28"))
	l.status = func(context.Context) (st lb.Status, err error) {
		for i := range 4 {
			st.Services = append(st.Services, lb.ServiceStatus{
				Service: fmt.Sprint("ns/s", i), Address: netip.AddrFrom4([4]byte{203, 0, 113, byte(i + 1)}),
			})
		}
		return st, nil
	}
	for pool, want := range map[string]string{
		"203.0.113.0/28": "", "203.0.113.2/31": "",
		"198.51.100.0/28": "4 of 5 services would lose an address: ns/s0, ns/s1",
	} {
		cfg := parse(t, fmt.Sprintf(head, pool))
		cfg.Services = parse(t, webTOML).Services
		_, err := l.permit(cfg, "")
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("pool %s: %v; want %q", pool, err, want)
		}
	}
}

// A start with a file that a reload would refuse continues with the last one in force, and says so.
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
		if !strings.HasSuffix(st.text, tt.inForce) || (st.refused != "") != tt.refused ||
			len(a.reloader.findings()) > 0 {
			t.Errorf("in force is\n%s\nrefused: %q, findings %v", st.text, st.refused, a.reloader.findings())
		}
	}
}
