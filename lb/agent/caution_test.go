package agent

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

type putSink struct {
	lb.Sink
	put map[string]*lb.Service
}

func (p putSink) Put(s *lb.Service)  { p.put[s.Name] = s }
func (p putSink) Delete(name string) { delete(p.put, name) }

// After three panics in a row the agent starts without the latest input, says so, and uses it after ten minutes. A
// clean end, or ten minutes between two panics, restart the count. An agent that is killed does not count.
func TestThreePanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		web := func(vip string) *lb.Service {
			return &lb.Service{Name: "a/" + vip, VIPs: []netip.Addr{netip.MustParseAddr(vip)}}
		}
		var c *caution
		var out putSink
		start := func() *problems {
			out = putSink{put: map[string]*lb.Service{}}
			p := newProblems(discard)
			c = openCaution(out, dir, p, discard)
			return p
		}
		panics := func() { // as the runtime does, see TestPanicIsReported
			must.Do(t, os.WriteFile(filepath.Join(dir, "panic"), []byte("panic: test\n"), 0o600))
		}
		run := func(d time.Duration) {
			stop := must.Run(t, c.run)
			time.Sleep(d)
			stop()
		}
		state := func() (list string) {
			for _, vip := range []string{"203.0.113.1", "203.0.113.2"} {
				if s := out.put["a/"+vip]; s != nil {
					list += fmt.Sprint(" ", s.Frozen)
				}
			}
			return list
		}
		start()
		c.Put(web("203.0.113.1"))
		run(25 * time.Minute) // trusted now
		for range endsMax + 1 {
			p := start()
			must.Need(t, len(p.findings()) == 0, "problems %q after kills", lbtest.Texts(p.findings()))
		}
		for range endsMax - 1 {
			panics()
			p := start()
			must.Need(t, len(p.findings()) == 0, "problems %q after fewer panics", lbtest.Texts(p.findings()))
		}
		panics()
		p := start()
		c.Put(web("203.0.113.1"))
		c.Put(web("203.0.113.2"))
		got := lbtest.Texts(p.findings())
		must.True(t, state() == " false true" && len(got) == 1 && strings.Contains(got[0], "3 agents in a row"),
			"frozen%s, problems %q; want the new one frozen", state(), got)
		must.Row(t, "weight", -1, c.health(lb.Health{Weight: 7}).Weight)
		again := web("203.0.113.1")
		again.Affinity = time.Second
		c.Put(again)
		must.True(t, state() == " true true", "frozen%s; want a reconfigured one frozen", state())
		run(11 * time.Minute)
		if h := c.health(lb.Health{Weight: 7}); state() != " false false" || len(p.findings()) > 0 || h.Weight != 7 {
			t.Errorf("frozen%s, problems %v, weight %d after ten minutes", state(), p.findings(), h.Weight)
		}
		p = start()
		must.True(t, len(p.findings()) == 0, "problems %q after a clean end", lbtest.Texts(p.findings()))
	})
}

// The runtime writes the report of a panic in any goroutine to the file, and the next start finds it once.
func TestPanicIsReported(t *testing.T) {
	if dir := os.Getenv("STEELYARD_TEST_PANIC"); dir != "" {
		panicked(dir, discard)
		go panic("test")
		select {}
	}
	dir := t.TempDir()
	child := exec.Command(os.Args[0], "-test.run", "^TestPanicIsReported$")
	child.Env = append(os.Environ(), "STEELYARD_TEST_PANIC="+dir)
	if err := child.Run(); child.ProcessState.ExitCode() != 2 {
		t.Fatalf("the child ended with %v", err)
	}
	first, second := panicked(dir, discard), panicked(dir, discard)
	text, err := os.ReadFile(filepath.Join(dir, "panic.last"))
	must.True(t, first && !second && err == nil && strings.Contains(string(text), "panic: test"),
		"found %t and %t, want true and false; report %q, %v", first, second, text, err)
}
