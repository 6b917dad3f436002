package cli

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// busy serves two servers: a is slow, and b has 2,000 packets per second. The agent reads its counters every 500 ms.
func busy(t *testing.T) (socket string) {
	began := time.Now()
	return serve(t, lb.Status{}, func(o *admin.Options) {
		o.Status = func(context.Context) (lb.Status, error) {
			elapsed := time.Since(began).Truncate(500 * time.Millisecond)
			read, packets := began.Add(elapsed), uint64(elapsed/(500*time.Microsecond))
			a := lb.BackendStatus{Service: "web", Address: addr("10.0.0.1"), Port: 80, State: lb.StateUnhealthy,
				ProbeTimes: lb.ProbeTimes{Last: 0.1, P95: 2},
				Traffic:    lb.Traffic{PacketRate: 7, BitRate: 2e6, Read: read}}
			b := lb.BackendStatus{Service: "web", Address: addr("10.0.0.2"), Port: 80, State: lb.StateHealthy,
				ProbeTimes: lb.ProbeTimes{Last: 0.2, P95: 0.2}, Handshake95: 1.05,
				Traffic: lb.Traffic{Packets: packets, PacketRate: 8, Read: read}}
			s := lb.ServiceStatus{Service: "web", Address: addr("203.0.113.10"), Port: 80, Protocol: lb.TCP,
				Policy: lb.PolicyCluster, Forward: lb.MethodNAT, Algorithm: lb.AlgorithmMaglev,
				Backends: []lb.BackendStatus{a, b}}
			return lb.Status{
				Settled: true, Services: []lb.ServiceStatus{s}, Backends: []lb.BackendStatus{b, a},
			}, nil
		}
	})
}

// The first rates are the agent's averages, and the next ones those of the interval. The order is that of --sort.
func TestTop(t *testing.T) {
	socket := busy(t)
	for order, want := range map[string][2]string{
		"bits": {"BITS/S", "2.0M    web      10.0.0.1:80"}, "packets": {"PKTS/S", "8.0     web      10.0.0.2:80"},
		"probe": {"PROBE", "200ms  web      10.0.0.2:80"}, "p95": {"P95", "2s     web      10.0.0.1:80"},
		"service":   {"SERVICE", "web      10.0.0.2:80"},
		"handshake": {"HANDSHAKE", "1.05s      web      10.0.0.2:80"},
	} {
		header, first := want[0], want[1]
		code, out, errOut := steelyard(t, "top", "--sort", order, "--socket", socket)
		lines := strings.Split(out, "\n")
		must.True(t, code == 0 && len(lines) == 10 && strings.HasPrefix(lines[3], header) &&
			strings.HasPrefix(lines[6], header) && strings.HasPrefix(lines[7], first),
			"--sort %s: code %d\n%s%s", order, code, out, errOut)
		must.True(t, order != "service" || strings.Contains(out, "web      203.0.113.10:80/tcp  1/2      0      0"+
			"       0       -     200ms  2s   1.05s\n"),
			"the service has the longest durations of its servers:\n%s", out)
	}
	code, out, _ := steelyard(t, "top", "-n", "12", "--interval", "100ms", "--sort", "packets", "--socket", socket)
	var rates []string
	for line := range strings.Lines(out) {
		if fields := strings.Fields(line); len(fields) > 4 && fields[2] == "10.0.0.2:80" {
			rates = append(rates, fields[0])
		}
	}
	must.True(t, code == 0 && len(rates) == 12 && slices.Equal(slices.Compact(rates), []string{"8.0", "2.0k"}),
		"code %d, rates %q\n%s", code, rates, out)
	for _, args := range []string{"--sort name", "--interval 1ms", "-n -1"} {
		code, _, errOut := steelyard(t, append([]string{"top", "--socket", socket}, strings.Fields(args)...)...)
		must.True(t, code == 2, "%s: code %d: %s", args, code, errOut)
	}
	code, _, errOut := steelyard(t, "top", "--socket", "/nowhere.sock")
	must.True(t, code == 1 && strings.Contains(errOut, "no agent listens"), "code %d: %s", code, errOut)
}

// A narrow terminal shows the figures, with the ends of long names, and a low one says how many rows are missing.
func TestTopFits(t *testing.T) {
	socket := busy(t)
	for name, tt := range map[string]struct {
		rows, columns int
		want          []string
	}{
		"80 columns": {24, 80, []string{
			"BITS/S  SERVICE  BACKEND      STATE      NEW/S  PKTS/S  LAST  PROBE  P95\n", "  …113.10:80/tcp  1/2 ",
		}},
		"40 columns": {24, 40, []string{"\n2.0M    web      10.0.0.1:80"}},
		"9 rows":     {9, 80, []string{"P95\n… and 2 more\n"}},
		"2 rows":     {2, 80, []string{"P95\n… and 1 more\n"}},
	} {
		top := topView{agent: admin.NewClient(socket), order: topOrders[3]}
		top.size = func() (int, int) { return tt.rows, tt.columns }
		text := must.Get(top.text(t.Context()))(t)
		for _, want := range tt.want {
			must.True(t, strings.Contains(text, want), "%s: no %q in\n%s", name, want, text)
		}
		_, tables, _ := strings.Cut(text, "\n\n")
		for line := range strings.Lines(tables) {
			must.True(t, tt.columns < 80 || len([]rune(line)) <= 81, "%s: a line is too long: %s", name, line)
		}
		must.True(t, tt.rows < 9 || strings.Count(text, "\n") < tt.rows, "%s: too long:\n%s", name, text)
	}
}

// While an agent restarts, top keeps the figures and shows the error above them.
func TestTopWithoutAgent(t *testing.T) {
	socket := busy(t)
	top := topView{agent: admin.NewClient(socket), order: topOrders[0]}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	n := 0
	must.Do(t, top.repeat(ctx, time.Millisecond, -1, func(text string) error {
		away := strings.HasPrefix(text, "no agent listens on ")
		must.True(t, away == (n == 1) && strings.Contains(text, "10.0.0.2:80"), "text %d:\n%s", n, text)
		switch n++; n {
		case 1:
			return os.Rename(socket, socket+".away")
		case 2:
			return os.Rename(socket+".away", socket)
		}
		cancel()
		return nil
	}))
	must.Equal(t, 3, n)
}

// A dumb terminal gets plain text, once.
func TestTopOnDumbTerminal(t *testing.T) {
	t.Setenv("TERM", "dumb")
	near, far := openTerminal(t)
	var errOut strings.Builder
	code := Main(t.Context(), []string{"top", "--socket", busy(t)}, far, &errOut, programs)
	buf := make([]byte, 1<<16)
	n := must.Get(near.Read(buf))(t)
	must.True(t, code == 0 && n > 0 && !bytes.Contains(buf[:n], []byte("\x1b")), "code %d: %q", code, buf[:n])
}

// On a terminal, top redraws the screen with colours until somebody presses q, and leaves the terminal as it was.
func TestTopOnTerminal(t *testing.T) {
	t.Setenv("TERM", "xterm")
	near, far := openTerminal(t)
	must.Do(t, unix.IoctlSetWinsize(int(near.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 12, Col: 60}))
	before := must.Get(unix.IoctlGetTermios(int(far.Fd()), unix.TCGETS))(t)
	seen := make(chan string, 100)
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, err := near.Read(buf)
			if err != nil {
				return
			}
			seen <- string(buf[:n])
		}
	}()
	ended := make(chan int, 1)
	var errOut strings.Builder
	go func() {
		ended <- Main(t.Context(), []string{"top", "--interval", "100ms", "--socket", busy(t)}, far, &errOut, programs)
	}()
	var text string
	for frames := 0; frames < 3; frames = strings.Count(text, "\x1b[H") {
		select {
		case x := <-seen:
			text += x
		case <-time.After(10 * time.Second):
			t.Fatalf("only %d frames: %q, %s", frames, text, &errOut)
		}
	}
	must.True(t, strings.Contains(text, "\x1b[31munhealthy\x1b[0m"), "the state has no colour: %q", text)
	for line := range strings.SplitSeq(colours.ReplaceAllString(text, ""), "\n") {
		must.True(t, len([]rune(strings.TrimSuffix(line, "\r"))) <= 60, "a line is too long: %q", line)
	}
	must.Get(near.WriteString("q"))(t)
	select {
	case code := <-ended:
		must.True(t, code == 0, "code %d: %s", code, &errOut)
	case <-time.After(10 * time.Second):
		t.Fatal("q does not end it")
	}
	must.Equal(t, before, must.Get(unix.IoctlGetTermios(int(far.Fd()), unix.TCGETS))(t))
}

var colours = regexp.MustCompile(`\x1b\[[?0-9]*[a-zA-Z]`)

// openTerminal returns both ends of a pseudoterminal.
func openTerminal(t *testing.T) (near, far *os.File) {
	near = must.Get(os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0))(t)
	t.Cleanup(func() { near.Close() })
	must.Do(t, unix.IoctlSetPointerInt(int(near.Fd()), unix.TIOCSPTLCK, 0))
	n := must.Get(unix.IoctlGetInt(int(near.Fd()), unix.TIOCGPTN))(t)
	far = must.Get(os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0))(t)
	t.Cleanup(func() { far.Close() })
	return near, far
}
