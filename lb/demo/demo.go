package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Options are the parameters of Run.
type Options struct {
	// Pace is the pause after each step on a terminal, for reading its output.
	Pace time.Duration
}

// show is a running demo.
type show struct {
	*network
	*screen
	rows []row
}

// step is one part of the demo. run returns its result in a few words, for the summary.
type step struct {
	title, text string
	run         func(*show, context.Context) (string, error)
}

var steps = []step{
	{"Announce", "both balancers announce both addresses to the router", (*show).announce},
	{"Balance", "requests spread over balancers and servers", (*show).balance},
	{"A server fails", "s2 crashes; its checks fail, and new requests go to the other servers", (*show).serverFails},
	{"All servers fail", "no backend is healthy: the routes must be withdrawn", (*show).allServersFail},
	{"Recovery", "the servers are started again", (*show).recovery},
	{
		"kill -9 of an agent", "the kernel continues to forward, and the router keeps the route (graceful restart)",
		(*show).agentKilled,
	},
	{"A balancer loses power", "its link goes down at the router; the other balancer takes over", (*show).powerOff},
	{"Power on", "power on, agent started, route announced again", (*show).powerOn},
	{"Maintenance", "SIGTERM: withdraw first, then exit", (*show).maintenance},
}

// Run runs the demo and writes it to out. self is the path of this binary. It returns nil only if every step showed the
// expected result. In either case it removes everything it created.
func Run(ctx context.Context, out io.Writer, self string, o Options) (err error) {
	s := &show{screen: newScreen(out)}
	start := time.Now()
	s.line("%s", s.paint(bold, "steelyard demo: eight hosts and two switches, in namespaces on this machine; "+
		"nothing outside them changes"))
	if s.network, err = build(self); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	s.line("%s", s.picture())
	for i, st := range steps {
		s.heading(i+1, st.title, st.text)
		begin := time.Now()
		seen, err := st.run(s, ctx)
		s.clear()
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; the network was removed: %w", context.Cause(ctx))
		}
		if err != nil {
			s.rows = append(s.rows, row{st.title, "failed", time.Since(begin), true})
			s.showLogs()
			s.summary(s.rows)
			return fmt.Errorf("step %d, %s: %w", i+1, st.title, err)
		}
		s.rows = append(s.rows, row{st.title, seen, time.Since(begin), false})
		if s.tty {
			pause(ctx, o.Pace)
		}
	}
	s.summary(s.rows)
	s.line("\n%s All steps succeeded, in %s.", s.paint(green, "✓"), short(time.Since(start)))
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// until waits until f returns nil, and shows the condition while it waits.
func (s *show) until(ctx context.Context, what string, f func() error) (time.Duration, error) {
	start := time.Now()
	took, err := lab.Until(ctx, stepTimeout, what, func() error {
		err := f()
		if err != nil {
			s.waiting(fmt.Sprintf("%s (%s): %v", what, short(time.Since(start)), err))
		}
		return err
	})
	s.clear()
	if err != nil {
		err = fmt.Errorf("expected that %s within %v; observed: %w", what, stepTimeout, err)
	}
	return took, err
}

// showLogs shows the end of every process's log, to find the cause of a failed step.
func (s *show) showLogs() {
	logs := map[string]*lab.Process{"router": s.router}
	for _, a := range s.agents {
		logs[a.Name()] = a.Process()
	}
	for _, name := range []string{"lb1", "lb2", "router"} {
		if p := logs[name]; p != nil {
			s.line("   %s end of the log of %s:", s.paint(red, "✗"), name)
			s.note("%s", p.Log.FailureTail(15))
		}
	}
}

// readingTime is Main's Pace.
const readingTime = 1500 * time.Millisecond

// Main is "steelyard demo": it runs the demo with this binary, and on a terminal pauses after each step.
func Main(ctx context.Context, out io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this binary: %w", err)
	}
	return Run(ctx, out, self, Options{Pace: readingTime})
}
