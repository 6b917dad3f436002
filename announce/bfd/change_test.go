package bfd_test

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A changed interval and multiplier are in force on both sides, and the session does not end for them.
func TestChangeWhileUp(t *testing.T) {
	const multiplier = 10 // on a busy machine, 3 packets may be late
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		p := newPairOf(t, kind, multiplier)
		child := p.start(t, "192.0.2.1", multiplier)
		p.sees(t, "192.0.2.2", "up")
		p.hears(t, 100*time.Millisecond, multiplier)
		before := p.since(t)
		change := func(s syscall.Signal, interval time.Duration, multiplier int) {
			t.Helper()
			send(t, s, child)
			p.hears(t, interval, multiplier)
			time.Sleep(2 * time.Second) // for a detection time that is too short
			if p.ended(t, before) {
				t.Errorf("%v × %d: the session has ended at the router", interval, multiplier)
			}
			if log := strings.Join(child.Log.Lines(), "\n"); strings.Contains(log, "bfd session down") {
				t.Errorf("%v × %d: the session has ended:\n%s", interval, multiplier, log)
			}
		}
		change(syscall.SIGUSR1, slowInterval, slowMultiplier)
		change(syscall.SIGUSR2, 100*time.Millisecond, multiplier)
		change(syscall.SIGUSR1, slowInterval, slowMultiplier)
		// Before, both sides noticed a failure within a second.
		send(t, syscall.SIGSTOP, p.daemon.Processes...)
		took := labtest.Until(t, 20*time.Second, "the monitor notices", func() error {
			log := strings.Join(child.Log.Lines(), "\n")
			return labtest.ErrorIf(!strings.Contains(log, "bfd session down"), "log:\n%s", log)
		})
		if took < 3*time.Second {
			t.Errorf("the monitor has noticed the router after %v", took)
		}
		t.Logf("%s frozen: noticed after %v", kind, took)
		send(t, syscall.SIGCONT, p.daemon.Processes...)
		labtest.Until(t, 20*time.Second, "the router notices that it was frozen", func() error {
			return labtest.ErrorIf(!p.ended(t, before), "the session has not ended there")
		})
		p.sees(t, "192.0.2.2", "up")
		p.hears(t, slowInterval, slowMultiplier)
		send(t, syscall.SIGSTOP, child)
		if took = p.sees(t, "192.0.2.2", "down"); took < 3*time.Second {
			t.Errorf("%s has noticed the node after %v", kind, took)
		}
		t.Logf("node frozen: %s has noticed after %v", kind, took)
		send(t, syscall.SIGCONT, child)
	})
}

func send(t *testing.T, s syscall.Signal, to ...*lab.Process) {
	t.Helper()
	for _, p := range to {
		must.Do(t, p.Signal(s))
	}
}

// hears waits until the router has learned the interval and the multiplier of the node.
func (p pair) hears(t *testing.T, interval time.Duration, multiplier int) {
	t.Helper()
	command, want := "show bfd peer 192.0.2.2 json", fmt.Sprintf(
		`(?s)"remote-transmit-interval":%d,.*"remote-detect-multiplier":%d,`, interval.Milliseconds(), multiplier)
	if p.daemon.Kind == peers.BIRD { // the last column is the detection time
		command = "show bfd sessions"
		want = fmt.Sprintf(`(?m)^192\.0\.2\.2 .* %.3f *$`, (time.Duration(multiplier) * interval).Seconds())
	}
	pattern := regexp.MustCompile(want)
	what := fmt.Sprintf("%s hears of %v × %d", p.daemon.Kind, interval, multiplier)
	labtest.Until(t, 20*time.Second, what, func() error {
		out, err := p.daemon.Show(t.Context(), command)
		return errors.Join(err, labtest.ErrorIf(!pattern.MatchString(out), "want %s:\n%s", want, out))
	})
}

// since returns a number that changes by at least 1 when the session of the router has ended and is up again.
func (p pair) since(t *testing.T) float64 {
	t.Helper()
	command, pattern := "show bfd peer 192.0.2.2 counters", `Session (down) (events): (\d+)`
	if p.daemon.Kind == peers.BIRD { // the time since when it is up, in seconds
		command, pattern = "show bfd sessions", `192\.0\.2\.2 +\S+ +\S+ +(\d+):(\d+):([0-9.]+)`
	}
	out, err := p.daemon.Show(t.Context(), command)
	found := regexp.MustCompile(pattern).FindStringSubmatch(out)
	if err != nil || found == nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	number := func(n int) float64 { x, _ := strconv.ParseFloat(found[n], 64); return x } // 0 for a word
	return 3600*number(1) + 60*number(2) + number(3)
}

// ended reports whether the session of the router has ended since. BIRD derives the time of day from another clock, and
// may print a time that differs by a millisecond.
func (p pair) ended(t *testing.T, since float64) bool { return math.Abs(p.since(t)-since) > 0.5 }
