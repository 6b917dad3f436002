package bgp_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// wantReason waits until the status of the peer has a reason with all these words.
func wantReason(t *testing.T, c *child, peer netip.Addr, words ...string) lb.PeerStatus {
	t.Helper()
	var p lb.PeerStatus
	labtest.Until(t, timeout, fmt.Sprintf("a reason with %q", words), func() error {
		p = c.peer(peer)
		for _, w := range words {
			if !strings.Contains(p.LastError, w) {
				return fmt.Errorf("peer %+v", p)
			}
		}
		return nil
	})
	if p.State == "established" {
		t.Errorf("peer %+v is established", p)
	}
	return p
}

func sessionDownLines(c *child) (lines []string) {
	for _, line := range c.Log.Lines() {
		if strings.Contains(line, "bgp session down") {
			lines = append(lines, line)
		}
	}
	return lines
}

// With a wrong password the router does not respond, and the status has a hint. When the router connects too, its
// segments say that the passwords differ.
func TestWrongPassword(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		for _, row := range []struct {
			name, ours, theirs string
			passive, waits     bool // the router, this node
			words              []string
		}{
			{"differs", "wrong", "right", false, false, []string{"no TCP connection to 192.0.2.1:179 for",
				"the peer sends TCP segments with a wrong MD5 signature",
				"check the password (MD5) on both sides"}},
			{"none here", "", "right", false, false, []string{"no TCP connection to 192.0.2.1:179 for",
				"with an MD5 signature: it has a password, this node has none"}},
			{"none there", "right", "", false, false, []string{"no TCP connection to 192.0.2.1:179 for",
				"without an MD5 signature: it has no password (MD5), this node has one"}},
			{"passive router", "wrong", "right", true, false, []string{"no TCP connection to 192.0.2.1:179 for",
				"no response; if the peer is up, check filters of that port, and the password (MD5) on both sides"}},
			{"waits", "wrong", "right", false, true, []string{"the peer sends TCP segments with a wrong MD5"}},
			{"waits, none there", "right", "", false, true, []string{"it has no password (MD5), this node has one"}},
		} {
			t.Run(row.name, func(t *testing.T) {
				b := newBench(t)
				b.router(kind, func(c *peers.RouterConfig) {
					c.Neighbors[0].Password, c.Neighbors[0].Passive = row.theirs, row.passive
				})
				o := b.options()
				o.Peers[0].Password, o.Peers[0].Passive = row.ours, row.waits
				c := startChild(t, b.host, o)
				c.set(vip4)
				wantReason(t, c, b.theirs[0][0], row.words...)
				labtest.Until(t, timeout, "a line in the log", func() error {
					return labtest.ErrorIf(len(sessionDownLines(c)) == 0, "none")
				})
				if lines := sessionDownLines(c); len(lines) == 0 || len(lines) > 2 {
					t.Errorf("log lines %q", lines)
				}
			})
		}
	})
}

// What one peer's segments show is a hint only about this peer. (There was one counter for all of them.)
func TestPasswordHintIsOfThePeer(t *testing.T) {
	b := newBench(t)
	for _, passive := range []bool{false, true} {
		b.router(peers.BIRD, func(c *peers.RouterConfig) {
			c.Neighbors[0].Password, c.Neighbors[0].Passive = "right", passive
		})
	}
	o := b.options()
	o.Peers[0].Password, o.Peers[1].Password = "wrong", "wrong"
	c := startChild(t, b.host, o)
	c.set(vip4)
	wantReason(t, c, b.theirs[0][0], "with a wrong MD5 signature")
	p := wantReason(t, c, b.theirs[1][0], "no response; if the peer is up")
	if strings.Contains(p.LastError, "sends TCP segments") {
		t.Errorf("the hint of the first peer is that of the second: %s", p.LastError)
	}
}

// Over IPv6 the kernel passes segments without their IP header.
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

func TestRightPassword(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		for _, passive := range []bool{false, true} {
			t.Run(fmt.Sprintf("passive=%v", passive), func(t *testing.T) {
				b := newBench(t)
				r := b.router(kind, func(c *peers.RouterConfig) {
					c.Neighbors[0].Password, c.Neighbors[0].Passive = "secret", passive
				})
				o := b.options()
				o.Peers[0].Password = "secret"
				c := startChild(t, b.host, o)
				c.set(vip4)
				want(t, r, vip4, b.ours[0][0])
				c.terminate()
				want(t, r, vip4)
			})
		}
	})
}

// The router expects another ASN than ours, or has another one than configured here.
func TestWrongASN(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		t.Run("ours", func(t *testing.T) {
			b := newBench(t)
			b.router(kind, func(c *peers.RouterConfig) { c.Neighbors[0].ASN = 64999 })
			c := startChild(t, b.host, b.options())
			c.set(vip4)
			wantReason(t, c, b.theirs[0][0], "received NOTIFICATION", "bad peer as")
		})
		t.Run("theirs", func(t *testing.T) {
			b := newBench(t)
			b.router(kind, func(c *peers.RouterConfig) { c.ASN = 64999 })
			c := startChild(t, b.host, b.options())
			c.set(vip4)
			wantReason(t, c, b.theirs[0][0], "as number mismatch expected 64500, received 64999")
		})
	})
}

func TestConnectionRefused(t *testing.T) {
	b := newBench(t)
	b.link("router")
	c := startChild(t, b.host, b.options())
	c.set(vip4)
	p := wantReason(t, c, b.theirs[0][0], "no TCP connection to 192.0.2.1:179 for", "connection refused")
	if p.Routes != 0 {
		t.Errorf("%d routes announced without a session", p.Routes)
	}
	<-time.After(8 * time.Second) // several more attempts
	if lines := sessionDownLines(c); len(lines) != 1 {
		t.Errorf("logged %d times:\n%s", len(lines), strings.Join(lines, "\n"))
	}
	c.terminate()
}

// The port is in use: the speaker says so, and only connects.
func TestPortInUse(t *testing.T) {
	b := newBench(t)
	b.link("router")
	must.Get(b.host.Listen(t.Context(), "tcp", "0.0.0.0:179"))(t)
	c := startChild(t, b.host, b.options())
	c.set(vip4)
	labtest.Until(t, 10*time.Second, "the speaker says so", func() error {
		return labtest.ErrorIf(!c.Log.Contains("not listening; only connecting"), "%s", c.Log.Tail(5))
	})
	c.terminate()
}
