package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestTrace traces real packets of each forward method and hook.
func TestTrace(t *testing.T) {
	t.Parallel()
	variants(t, func(t *testing.T, kind peers.RouterKind, mode string) {
		t.Parallel()
		s := newSite(t, kind, mode, 1, 3)
		t.Run("captures both sides", func(t *testing.T) {
			s.captures(t, `192\.0\.2\.130\.\d+ > 192\.0\.2\.2\d\.8080: Flags \[S\]`)
		})
		t.Run("shows drops", s.showsDrops)
		t.Run("survives a kill of the agent", s.tracedAgentKilled)
		t.Run("loses none of 10,000 packets per second", s.tracesAll)
	})
	for _, m := range methods {
		t.Run(m.name+"/"+m.mode, func(t *testing.T) {
			t.Parallel()
			after := map[string]string{
				"": `CLIENT\.\d+ > 203.0.113.10.80: Flags \[S\]`, ipip: ` \S+ > \S+: CLIENT\.\d+ > 203.0.113.10.80`,
				gue: `\.6090: UDP`,
			}
			s := newDirectSite(t, lab.Shape{Clients: 1, Balancers: 1, Servers: 3}, m, 3)
			s.captures(t, after[m.extra])
		})
	}
}

// traced starts "steelyard trace" on the balancer.
func (s *site) traced(t *testing.T, args ...string) *lab.Process {
	t.Helper()
	p := must.Get(s.Balancers[0].Host.Start(lab.Command{Path: binary, Args: append([]string{"trace"}, args...)}))(t)
	labtest.Until(t, "the trace begins", func() error {
		must.Need(t, p.Running(), "the trace ended with %v:\n%s", p.Ended(), p.Log.Tail(10))
		return labtest.ErrorIf(!p.Log.Contains("tracing"), "%s", p.Log.Tail(10))
	})
	return p
}

// ended ends a trace as Ctrl-C does, and returns what it has printed.
func ended(t *testing.T, p *lab.Process) []string {
	t.Helper()
	time.Sleep(200 * time.Millisecond) // ten times as long as the agent keeps packets
	must.Do(t, p.Signal(syscall.SIGINT))
	ctx, cancel := context.WithTimeout(t.Context(), lab.Ready)
	defer cancel()
	must.Need(t, p.Wait(ctx) == nil, "the trace ended with %v:\n%s", p.Ended(), p.Log.Tail(10))
	return p.Log.Lines()
}

// read returns the packets in a capture as tcpdump prints them, with the client's address as CLIENT.
func (s *site) read(t *testing.T, file string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "tcpdump", "-nn", "-e", "-r", file).Output()
	must.Need(t, err == nil, "tcpdump: %v", err)
	text := strings.ReplaceAll(string(out), s.Clients[0].V4.String(), "CLIENT")
	return strings.Split(strings.TrimSpace(text), "\n")
}

// captures captures a connection and checks its SYN as it arrived and as it left.
func (s *site) captures(t *testing.T, after string) {
	file := filepath.Join(t.TempDir(), "capture.pcapng")
	p := s.traced(t, "--client", s.Clients[0].V4.String(), "--service", "web", "-w", file)
	_, err := s.dial(t, vip4, 9000)
	must.Do(t, err)
	_, err = s.dial(t, vip4, 80)
	must.Do(t, err)
	ended(t, p)
	lines := s.read(t, file)
	before := regexp.MustCompile(`CLIENT\.\d+ > 203\.0\.113\.10\.80: Flags \[S\]`)
	i := slices.IndexFunc(lines, before.MatchString)
	must.Need(t, i >= 0 && i+1 < len(lines), "no SYN:\n%s", strings.Join(lines, "\n"))
	must.True(t, regexp.MustCompile(after).MatchString(lines[i+1]), "the SYN left as\n%s; want %s", lines[i+1], after)
	macs := regexp.MustCompile(`\S+ > [0-9a-f:]+,`)
	must.True(t, macs.FindString(lines[i]) != macs.FindString(lines[i+1]), "the MAC addresses are the same:\n%s\n%s",
		lines[i], lines[i+1])
}

// showsDrops traces a packet to a port without a service, in words.
func (s *site) showsDrops(t *testing.T) {
	p := s.traced(t, "--drops", "--vip", vip4.String(), "--count", "1")
	_, err := s.dial(t, vip4, 80)
	must.Do(t, err)
	_, err = s.dial(t, vip4, 81)
	must.True(t, err != nil, "port 81 answers")
	ctx, cancel := context.WithTimeout(t.Context(), lab.Ready)
	defer cancel()
	must.Do(t, p.Wait(ctx))
	want := fmt.Sprintf(`eth0 (xdp|tc): reset: %s:\d+ > %s:81 tcp SYN => %[2]s:81 > %[1]s:\d+ tcp RST ACK on eth0; `+
		`no_frontend: the VIP has no service on this port`, s.Clients[0].V4, vip4)
	must.True(t, slices.ContainsFunc(p.Log.Lines(), regexp.MustCompile(want).MatchString),
		"printed\n%s\nwant a line with\n%s", p.Log.Tail(10), want)
}

// tracedAgentKilled kills the agent during a trace. Connections continue, and the next agent traces again.
func (s *site) tracedAgentKilled(t *testing.T) {
	p, a := s.traced(t), s.Agents[0]
	_, err := s.Balancers[0].Host.Run(t.Context(), binary, "trace")
	must.True(t, err != nil && strings.Contains(err.Error(), "another trace is running"), "a second trace: %v", err)
	all := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 50)
	a.Kill()
	<-p.Done()
	must.True(t, p.Ended() != nil, "the trace reports no error")
	labtest.Exchange(t, all, "without an agent")
	must.Do(t, a.Start())
	must.Do(t, a.WaitReady(t.Context(), lab.Ready))
	labtest.Exchange(t, all, "with the next agent")
	again := s.traced(t, "--client", s.Clients[0].V4.String())
	labtest.Exchange(t, all, "during a trace")
	lines := ended(t, again)
	must.True(t, len(lines) > 100, "the second trace printed only\n%s", strings.Join(lines, "\n"))
}

// tracesAll traces 5,000 requests and as many answers per second.
func (s *site) tracesAll(t *testing.T) {
	const seconds, batches, batch = 3, 500, 10
	file := filepath.Join(t.TempDir(), "capture.pcapng")
	p := s.traced(t, "--vip", vip4.String(), "-w", file)
	c := must.Get(s.Client().Dial(t.Context(), "udp", netip.AddrPortFrom(vip4, 5353).String()))(t)
	answers := make(chan int)
	go func() {
		n, buffer := 0, make([]byte, 100)
		for {
			if _, err := c.Read(buffer); err != nil {
				answers <- n
				return
			}
			n++
		}
	}()
	tick := time.NewTicker(time.Second / batches)
	defer tick.Stop()
	for range seconds * batches {
		for range batch {
			_, err := c.Write([]byte("ping"))
			must.Do(t, err)
		}
		<-tick.C
	}
	time.Sleep(300 * time.Millisecond) // for the last answers
	c.Close()
	lines, answered := ended(t, p), <-answers
	must.True(t, !strings.Contains(strings.Join(lines, "\n"), "left out"), "%s", strings.Join(lines, "\n"))
	count := func(text string) (n int) {
		for _, line := range s.read(t, file) {
			if strings.Contains(line, text) {
				n++
			}
		}
		return n
	}
	requests, replies := count("> 203.0.113.10.5353: "), count(": 203.0.113.10.5353 > ")
	must.True(t, requests == seconds*batches*batch && replies >= answered && answered > 0,
		"traced %d requests of %d and %d answers of %d", requests, seconds*batches*batch, replies, answered)
}
