package inside

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A Sync of many devices is cheap, because it leaves alone what is attached already.
func TestManyDevices(t *testing.T) {
	n := newNode(t)
	const pairs = 100
	n.do(func() error {
		for i := range pairs {
			v := netlink.NewVeth(netlink.LinkAttrs{Name: fmt.Sprint("a", i)})
			v.PeerName = fmt.Sprint("b", i)
			if err := netlink.LinkAdd(v); err != nil {
				return err
			}
		}
		return nil
	})
	d := n.devices(nil)
	timed := func(what string, f func() error) {
		start := time.Now()
		n.do(f)
		took := time.Since(start)
		t.Logf("%s: %v, %v per device", what, took, took/(2*pairs))
	}
	timed("attach", d.Sync)
	must.Equal(t, 2*pairs, len(d.Attached()))
	timed("nothing to do", d.Sync)
	d = n.devices(nil)
	timed("replace", d.Sync)
	must.Equal(t, 2*pairs, n.entryCount())
	timed("detach", d.detach)
}

// No query of a UDP Service is lost while many pods come and go. They are its endpoints, and ask it as soon as they
// have a route. Pods end after they have left the Service. With 1,000 pods, the test passes as well.
func TestPodsComeAndGo(t *testing.T) {
	t.Parallel()
	const pods, clients = 100, 100
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	c := &churn{network: n, p: p, to: netip.AddrPortFrom(clusterIP(true, 1), 53), live: map[netip.AddrPort]bool{
		n.pods["p2"].at(true, 5353): true, n.pods["q1"].at(true, 5353): true}}
	must.Do(t, c.apply())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	asking, ctxAsking := errgroup.WithContext(ctx)
	hosts := []*lab.Host{n.node, n.pods["p1"].Host, n.pods["b1"].Host}
	var asked atomic.Int64
	for i := range clients {
		asking.Go(func() error {
			for ctxAsking.Err() == nil {
				if err := c.ask(ctxAsking, hosts[i%len(hosts)], 10, 1); err != nil {
					return err
				}
				asked.Add(10)
			}
			return nil
		})
	}
	var coming errgroup.Group
	coming.SetLimit(8)
	for i := range pods {
		coming.Go(func() error { return c.comeAndGo(ctx, i) })
	}
	must.Do(t, coming.Wait())
	cancel()
	must.Do(t, asking.Wait())
	t.Logf("%d pods, %d queries, 0 lost", pods, asked.Load())
}

// churn is a UDP Service whose endpoints change.
type churn struct {
	*network
	p  *process
	to netip.AddrPort

	mu   sync.Mutex // guards live
	live map[netip.AddrPort]bool
}

// apply makes the live pods the endpoints.
func (c *churn) apply() error {
	r := c.rule("s:dns", c.to.Addr(), c.to.Port(), lb.UDP)
	r.Inside.Endpoints = slices.SortedFunc(maps.Keys(c.live), netip.AddrPort.Compare)
	return c.p.client.Call("Control.Apply", Change{map[string][]lb.NodeRule{"test/s": {r}}, true}, new(bool))
}

func (c *churn) set(at netip.AddrPort, live bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.live[at] = live; !live {
		delete(c.live, at)
	}
	return c.apply()
}

// ask sends queries from one socket, each at most tries times, until it is answered.
func (c *churn) ask(ctx context.Context, h *lab.Host, queries, tries int) error {
	u, err := h.Dial(context.WithoutCancel(ctx), "udp", c.to.String())
	if err != nil {
		return err
	}
	defer u.Close()
	for i := range queries {
		query := fmt.Sprintf("%d %s", i, u.LocalAddr())
		for try := 0; try < tries; try++ {
			if err = exchangeOnce(u, query); !errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("query of %s: %w", h, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil
}

func exchangeOnce(u net.Conn, query string) error {
	if err := u.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	if _, err := fmt.Fprint(u, query); err != nil {
		return err
	}
	b := make([]byte, 100)
	k, err := u.Read(b)
	if err == nil && !strings.HasSuffix(string(b[:k]), " "+query) {
		err = fmt.Errorf("answer %q to %q", b[:k], query)
	}
	return err
}

// comeAndGo makes a pod as a CNI plugin does, and removes it.
func (c *churn) comeAndGo(ctx context.Context, i int) error {
	h, err := c.lab.Host(fmt.Sprint("n", i))
	if err != nil {
		return err
	}
	defer h.Close()
	p, gateways, err := c.link(h, c.node, netip.AddrFrom4([4]byte{10, 244, byte(100 + i/64), byte(i % 64 * 4)}),
		netip.MustParseAddr(fmt.Sprintf("fd00:244:3:%x::", i)))
	if err != nil {
		return err
	}
	if err := h.AddRoute(lab.Default, gateways[0]); err != nil {
		return err
	}
	// The kernel drops what an interface sends while clsact is added (dev_deactivate in net/sched/sch_generic.c).
	if err := c.ask(ctx, h, 1, 3); err != nil {
		return fmt.Errorf("first query: %w", err)
	}
	time.Sleep(500 * time.Millisecond) // a pod is not ready before the agent knows its device
	echo, err := traffic.ServeUDPEcho(h, h.Name(), p.at(true, 5353))
	if err != nil {
		return err
	}
	if err := c.set(p.at(true, 5353), true); err != nil {
		return err
	}
	time.Sleep(100 * time.Millisecond)
	if err := c.set(p.at(true, 5353), false); err != nil {
		return err
	}
	time.Sleep(time.Second) // for what is on the way
	return errors.Join(echo.Stop(), c.node.Do(func() error {
		l, err := netlink.LinkByName("veth-" + h.Name())
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}))
}
