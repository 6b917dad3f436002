package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// farClient adds a client behind a router of its own. The link of that router to the lab's router has this MTU.
func (s *site) farClient(t *testing.T, mtu int) traffic.Client {
	t.Helper()
	edge, client := labtest.Host(t, s.Lab, "edge"), labtest.Host(t, s.Lab, "far")
	on := func(texts ...string) (p []netip.Prefix) {
		for _, text := range texts {
			p = append(p, netip.MustParsePrefix(text))
		}
		return p
	}
	steps := []func() error{
		edge.Forward,
		func() error {
			return s.Link(
				lab.End{Host: s.Topology.Router, Name: "far", Addresses: on("198.18.1.1/30", "2001:db8:301::1/64")},
				lab.End{Host: edge, Name: "up", Addresses: on("198.18.1.2/30", "2001:db8:301::2/64")},
				lab.LinkOptions{MTU: mtu})
		},
		func() error {
			return s.Link(
				lab.End{Host: edge, Name: "far", Addresses: on("198.18.2.1/24", "2001:db8:302::1/64")},
				lab.End{Host: client, Name: "eth0", Addresses: on("198.18.2.2/24", "2001:db8:302::2/64")},
				lab.LinkOptions{})
		},
		func() error { return edge.AddRoute(lab.Default, netip.MustParseAddr("198.18.1.1")) },
		func() error { return edge.AddRoute(lab.Default6, netip.MustParseAddr("2001:db8:301::1")) },
		func() error { return client.AddRoute(lab.Default, netip.MustParseAddr("198.18.2.1")) },
		func() error { return client.AddRoute(lab.Default6, netip.MustParseAddr("2001:db8:302::1")) },
		func() error {
			return s.Topology.Router.AddRoute(on("198.18.2.0/24")[0], netip.MustParseAddr("198.18.1.2"))
		},
		func() error {
			return s.Topology.Router.AddRoute(on("2001:db8:302::/64")[0], netip.MustParseAddr("2001:db8:301::2"))
		},
	}
	for _, step := range steps {
		must.Do(t, step())
	}
	return traffic.From(client)
}

// transferSize is in bytes.
const transferSize = 10 << 20

// transfers downloads and uploads transferSize bytes between a client and each VIP.
func transfers(t *testing.T, client traffic.Client) {
	for _, vip := range vips {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		start := time.Now()
		down, err := client.Get(ctx, fmt.Sprintf("%s?size=%d", labtest.URL(vip), transferSize))
		if err != nil || len(down.Body) < transferSize {
			t.Errorf("%d bytes from %s: %v", len(down.Body), vip, err)
		}
		took := time.Since(start)
		up, err := client.Upload(ctx, labtest.URL(vip), transferSize)
		if err != nil || up.Status != 200 {
			t.Errorf("to %s: status %d, %v", vip, up.Status, err)
		}
		t.Logf("%s: %s down, %s up", vip, took, time.Since(start)-took)
		cancel()
	}
}

// pathMTU: path MTU discovery works through a balancer. An ICMP error (fragmentation needed, packet too big) quotes a
// packet that the balancer has rewritten; the balancer forwards it to the sender behind it.
func (s *site) pathMTU(t *testing.T) {
	t.Run("far client", func(t *testing.T) { transfers(t, s.farClient(t, 1300)) })
	t.Run("near client", func(t *testing.T) { transfers(t, s.Client()) })
}
