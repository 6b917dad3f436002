package healthd

import (
	"context"
	"log/slog"
	"os/exec"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// silentServer never responds. During the first probe this process is stopped for 0.3 s.
type silentServer struct {
	probes  int
	trouble func() []string
	found   []string // the problems at the second probe
}

func (s *silentServer) Probe(ctx context.Context) (Result, error) {
	s.probes++
	if s.probes == 1 {
		if err := exec.Command("sh", "-c", "kill -STOP $PPID; sleep 0.3; kill -CONT $PPID").Run(); err != nil {
			return Result{}, ownError{err}
		}
	} else if s.probes == 2 {
		s.found = s.trouble()
	}
	<-ctx.Done()
	return Result{}, ctx.Err()
}

// A time-out on a node that did not run meanwhile says nothing about the server. The next one does.
func TestLateProbeIsInconclusive(t *testing.T) {
	reports := make(chan lb.Health, 8)
	p := New(Options{Report: func(h lb.Health) { reports <- h }, Log: slog.New(slog.DiscardHandler)})
	server := &silentServer{trouble: func() []string { return lbtest.Texts(p.Findings()) }}
	p.make = func(lb.Check) Checker { return server }
	p.Put("web", []lb.Check{{Key: lb.CheckKey{Service: "web"}, Presumed: true, Spec: lb.CheckSpec{
		Type: lb.CheckTCP, Interval: 500 * time.Millisecond, Timeout: 200 * time.Millisecond, Rise: 1, Fall: 1}}})
	stop := must.Run(t, p.Run)
	h := <-reports
	stop()
	if h.State != lb.StateUnhealthy || h.Reason != "no response within 200ms" || server.probes < 2 {
		t.Errorf("%s (%s) after %d probes; want unhealthy, after the first", h.State, h.Reason, server.probes)
	}
	want := "1 health checks are inconclusive, and their backends keep their states: " + errLate.Error()
	if len(server.found) != 1 || server.found[0] != want {
		t.Errorf("problems after the first probe: %q; want %q", server.found, want)
	}
}
