package bgp_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Tests with BIRD and FRR run the speaker in a child process, which has its own network namespace and can be killed. It
// is the test binary, with this variable set to the options.
const childOptions = "STEELYARD_BGP_TEST_CHILD"

const childSocket = "/run/speaker.sock"

func TestMain(m *testing.M) {
	if text := os.Getenv(childOptions); text != "" {
		if err := runChild(text); err != nil {
			os.Stderr.WriteString("speaker: " + err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	if port := os.Getenv(attackedGoBGP); port != "" {
		if err := runAttacked(port); err != nil {
			os.Stderr.WriteString("gobgp: " + err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	// Parallel tests wait for timers and use little CPU time.
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// request calls Configure and Set with those values that are not nil. The response always has the peers' states.
type request struct {
	Configure *bgp.Options
	Set       []lb.Announcement
	Sent      netip.Addr // peer whose routes to list
}

type response struct {
	Err   string
	Peers []lb.PeerStatus
	Sent  []lb.SentRoute

	Problems  []string
	Discarded map[string]float64 // BFD packets by reason, from the metrics
}

// runChild is the speaker process. Like the agent, it withdraws everything on SIGTERM and then exits. On SIGUSR1 it
// exits for a restart.
func runChild(text string) error {
	var o bgp.Options
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	o.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	s, err := bgp.New(o)
	if err != nil {
		return err
	}
	_ = os.Remove(childSocket)
	l, err := net.Listen("unix", childSocket)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGUSR1)
	var withdraw error
	go func() {
		if <-end == syscall.SIGUSR1 {
			s.Keep()
		}
		withdraw = s.Set(context.Background(), nil)
		cancel()
	}()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serveChild(s, c)
		}
	}()
	return errors.Join(s.Run(ctx), withdraw)
}

func serveChild(s *bgp.Speaker, c net.Conn) {
	defer c.Close()
	var q request
	if err := json.NewDecoder(bufio.NewReader(c)).Decode(&q); err != nil {
		return
	}
	var a response
	if q.Configure != nil {
		if err := s.Configure(context.Background(), *q.Configure); err != nil {
			a.Err = err.Error()
		}
	}
	if q.Set != nil {
		if err := s.Set(context.Background(), q.Set); err != nil {
			a.Err = err.Error()
		}
	}
	a.Peers, a.Problems, a.Discarded = s.Peers(), lbtest.Texts(s.Findings()), discarded(s)
	if q.Sent.IsValid() {
		a.Sent, _ = s.Sent(q.Sent)
	}
	_ = json.NewEncoder(c).Encode(a)
}

// discarded returns the values of steelyard_bfd_discarded_packets_total.
func discarded(s *bgp.Speaker) map[string]float64 {
	values, reg := map[string]float64{}, prometheus.NewPedanticRegistry()
	reg.MustRegister(s)
	families, err := reg.Gather()
	if err != nil {
		return nil
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == "steelyard_bfd_discarded_packets_total" {
				values[m.Label[0].GetValue()] = m.Counter.GetValue()
			}
		}
	}
	return values
}

// child is a speaker process on a host.
type child struct {
	*lab.Process
	t    testing.TB
	host *lab.Host
	o    bgp.Options
}

func startChild(t testing.TB, h *lab.Host, o bgp.Options) *child {
	t.Helper()
	c := runChildProcess(t, h, o)
	c.awaitUp()
	t.Cleanup(func() {
		if t.Failed() || os.Getenv("STEELYARD_BGP_DEBUG") != "" {
			t.Logf("log of the speaker:\n%s", c.Log.Tail(80))
		}
	})
	return c
}

// runChildProcess starts a speaker that may exit immediately.
func runChildProcess(t testing.TB, h *lab.Host, o bgp.Options) *child {
	t.Helper()
	c := &child{t: t, host: h, o: o}
	c.run()
	return c
}

func (c *child) start() {
	c.t.Helper()
	c.run()
	c.awaitUp()
}

func (c *child) awaitUp() {
	c.t.Helper()
	labtest.Until(c.t, "the speaker is up", func() error { _, err := c.call(request{}); return err })
}

func (c *child) run() {
	c.t.Helper()
	text := must.Get(json.Marshal(c.o))(c.t)
	binary := must.Get(os.Executable())(c.t)
	p := must.Get(c.host.Start(lab.Command{Path: binary, Env: []string{childOptions + "=" + string(text)}}))(c.t)
	c.Process = p
}

func (c *child) call(q request) (response, error) {
	var a response
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := c.host.Dial(ctx, "unix", childSocket)
	if err != nil {
		return a, err
	}
	defer conn.Close()
	if err := json.NewEncoder(conn).Encode(q); err != nil {
		return a, err
	}
	return a, json.NewDecoder(conn).Decode(&a)
}

func (c *child) set(vips ...netip.Addr) {
	c.t.Helper()
	c.setWeighted(announcements(vips...)...)
}

func (c *child) setWeighted(list ...lb.Announcement) {
	c.t.Helper()
	if list == nil {
		list = []lb.Announcement{}
	}
	a, err := c.call(request{Set: list})
	if err != nil || a.Err != "" {
		c.t.Fatalf("set %v: %v %s", list, err, a.Err)
	}
}

func (c *child) configure(o bgp.Options) {
	c.t.Helper()
	a, err := c.call(request{Configure: &o})
	if err != nil || a.Err != "" {
		c.t.Fatalf("configure %+v: %v %s", o, err, a.Err)
	}
}

func (c *child) peer(addr netip.Addr) lb.PeerStatus {
	c.t.Helper()
	a := must.Get(c.call(request{}))(c.t)
	for _, p := range a.Peers {
		if p.Peer == addr {
			return p
		}
	}
	c.t.Fatalf("no peer %v in %+v", addr, a.Peers)
	return lb.PeerStatus{}
}

// until waits until a peer's status is ok, and returns it.
func (c *child) until(peer netip.Addr, what string, ok func(lb.PeerStatus) bool) (p lb.PeerStatus) {
	c.t.Helper()
	labtest.Until(c.t, what, func() error {
		a, err := c.call(request{})
		i := slices.IndexFunc(a.Peers, func(p lb.PeerStatus) bool { return p.Peer == peer })
		if err != nil || i < 0 {
			return fmt.Errorf("%v is not in %+v (%v)", peer, a.Peers, err)
		}
		p = a.Peers[i]
		return labtest.ErrorIf(!ok(p), "%+v", p)
	})
	return p
}

// isEstablished is for until.
func isEstablished(p lb.PeerStatus) bool { return p.State == "established" }

// terminate stops the speaker with SIGTERM, like systemd, and checks the exit status.
func (c *child) terminate() {
	c.t.Helper()
	c.end(syscall.SIGTERM)
}

func (c *child) end(by syscall.Signal) {
	c.t.Helper()
	must.Do(c.t, c.Signal(by))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := c.Wait(ctx); err != nil {
		c.t.Errorf("the speaker exited with %v", err)
	}
}
