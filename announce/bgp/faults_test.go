package bgp_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// wantReason waits until the peer's status has a reason with all these words.
func wantReason(t *testing.T, c *child, peer netip.Addr, words ...string) lb.PeerStatus {
	t.Helper()
	var p lb.PeerStatus
	labtest.Until(t, fmt.Sprintf("a reason with %q", words), func() error {
		p = c.peer(peer)
		return lacks(p.LastError, words)
	})
	must.True(t, p.State != "established", "peer %+v is established", p)
	return p
}

// lacks returns an error unless text contains all these words.
func lacks(text string, words []string) error {
	for _, w := range words {
		if !strings.Contains(text, w) {
			return fmt.Errorf("no %q in %s", w, text)
		}
	}
	return nil
}

// downLines returns log lines about lost sessions with a peer.
func downLines(c *child, peer netip.Addr) (lines []string) {
	for _, line := range c.Log.Lines() {
		if strings.Contains(line, "bgp session down") && strings.Contains(line, "peer="+peer.String()+" ") {
			lines = append(lines, line)
		}
	}
	return lines
}

// With a wrong password the router does not respond, and the status has a hint. If the router also connects, its
// segments show that the passwords differ. Hints concern only this peer.
func TestWrongPassword(t *testing.T) {
	const sends, asks = "the peer sends TCP segments", "check the MD5 password on both sides"
	rows := []struct {
		name, ours, theirs string
		passive, waits     bool // passive: the router; waits: this node
		words              []string
	}{
		{"differs", "wrong", "right", false, false, []string{"no TCP connection to",
			sends + " with a wrong MD5 signature", asks}},
		{"none here", "", "right", false, false, []string{"no TCP connection to",
			sends + " with an MD5 signature: it has a password, this node has none"}},
		{"none there", "right", "", false, false, []string{"no TCP connection to",
			sends + " without an MD5 signature: it has no MD5 password, this node has one"}},
		{"passive router", "wrong", "right", true, false, []string{"no TCP connection to",
			"no response; if the peer is up, check filters for that port, and the MD5 password on both sides"}},
		{"waits", "wrong", "right", false, true, []string{sends + " with a wrong MD5"}},
		{"waits, none there", "right", "", false, true, []string{"it has no MD5 password, this node has one"}},
	}
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		for _, row := range rows {
			b.router(kind, func(c *peers.RouterConfig) {
				c.Neighbors[0].Password, c.Neighbors[0].Passive = row.theirs, row.passive
			})
		}
		o := b.options()
		for i, row := range rows {
			o.Peers[i].Password, o.Peers[i].Passive = row.ours, row.waits
		}
		c := startChild(t, b.host, o)
		c.set(vip4)
		for i, row := range rows {
			peer := b.theirs[i][0]
			p := wantReason(t, c, peer, row.words...)
			must.True(t, !row.passive || !strings.Contains(p.LastError, sends),
				"%s: the hint of another peer: %s", row.name, p.LastError)
			labtest.Until(t, "one or two lines in the log: "+row.name, func() error {
				n := len(downLines(c, peer))
				return labtest.ErrorIf(n == 0 || n > 2, "%d", n)
			})
		}
	})
}

// On IPv6 raw sockets, the kernel omits the IP header.
func TestPasswordHintOverIPv6(t *testing.T) {
	b := newBench(t)
	b.router(peers.BIRD, func(c *peers.RouterConfig) {
		c.Neighbors[0].Address, c.Neighbors[0].Password = b.ours[0][1], "right"
	})
	o := b.options()
	o.Peers[0].Address, o.Peers[0].Source, o.Peers[0].Password = b.theirs[0][1], b.ours[0][1], "wrong"
	c := startChild(t, b.host, o)
	c.set(vip4)
	wantReason(t, c, b.theirs[0][1], "with a wrong MD5 signature")
	o.Peers[0].Password = ""
	c.configure(o)
	wantReason(t, c, b.theirs[0][1], "it has a password, this node has none")
}

func TestConnectionRefused(t *testing.T) {
	b := newBench(t)
	b.link("router")
	o := b.options()
	o.Peers[0].Retry = 100 * time.Millisecond
	c := startChild(t, b.host, o)
	c.set(vip4)
	p := wantReason(t, c, b.theirs[0][0], "no TCP connection to 192.0.2.1:179 for", "connection refused")
	must.Row(t, "routes announced without a session", 0, p.Routes)
	<-time.After(time.Second) // time for several more attempts
	lines := downLines(c, b.theirs[0][0])
	must.True(t, len(lines) == 1, "logged %d times:\n%s", len(lines), strings.Join(lines, "\n"))
	c.terminate()
}

// A session stays on its device, whichever side connects. A new device affects only its own session. BIRD's session
// uses IPv4, FRR's IPv6.
func TestDevice(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		family, vip := 0, vip4
		if kind == peers.FRR {
			family, vip = 1, vip6
		}
		first := b.router(kind, nil)
		second := b.router(kind, func(c *peers.RouterConfig) { c.Neighbors[0].Address = b.ours[1][family] })
		o, peer, ours := b.options(), b.theirs[1][family], b.ours[1][family]
		o.Peers[0].Device, o.Peers[1].Address, o.Peers[1].Passive = "eth0", peer, true
		c := startChild(t, b.host, o)
		c.set(vip4, vip6)
		want(t, first, vip, b.ours[0][family])
		want(t, second, vip, ours)
		since := c.established(b.theirs[0][0])

		o.Peers[1].Device = "eth1"
		c.configure(o)
		before := c.established(peer)
		want(t, second, vip, ours)
		o.Peers[1].Device = "eth0"
		c.configure(o)
		wantReason(t, c, peer, "the peer connects through eth1, but device is eth0")
		o.Peers[1].Device, o.Peers[1].Passive = "eth1", false // FRR reconnects only after two minutes
		c.configure(o)
		must.True(t, !c.established(peer).Equal(before), "the session is the one before")
		want(t, second, vip, ours)
		c.kept(b.theirs[0][0], since)
	})
}

// While a device does not exist, the session is down for that reason.
func TestDeviceComesLater(t *testing.T) {
	b := newBench(t)
	b.link("other")
	o := b.options()
	later, inRange := netip.MustParseAddr("192.0.2.5"), netip.MustParsePrefix("192.0.2.8/30")
	o.Peers = []bgp.Peer{
		{Address: later, ASN: theirASN, HoldTime: o.Peers[0].HoldTime, Device: "eth1"},
		{ListenRange: inRange, ASN: theirASN, HoldTime: o.Peers[0].HoldTime, Device: "eth2"},
	}
	c := startChild(t, b.host, o)
	c.set(vip4)
	wantReason(t, c, later, "bind to device eth1: no such device")
	labtest.Until(t, "the range has a problem", func() error {
		a, err := c.call(request{})
		got := strings.Join(a.Problems, "; ")
		return labtest.ErrorIf(err != nil || !strings.Contains(got, "device eth2: no such device"), "%q, %v", got, err)
	})
	for i := range 2 {
		r := b.router(peers.BIRD, nil)
		want(t, r, vip4, b.ours[i+1][0])
	}
	labtest.Until(t, "no problem is left", func() error {
		a, err := c.call(request{})
		return labtest.ErrorIf(err != nil || len(a.Problems) > 0, "%q, %v", a.Problems, err)
	})
}
