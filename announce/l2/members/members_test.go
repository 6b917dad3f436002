package members

import (
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var vip, vip6 = netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8::10")

// node returns the nth loopback address.
func node(n int) netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 5, byte(n)}) }

// freePort returns an unused port.
func freePort(t *testing.T) uint16 {
	l := must.Get(net.Listen("tcp", "127.0.5.1:0"))(t)
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// start runs member i of n until stop is called.
func start(t *testing.T, port uint16, i, n int, keys ...string) (m *Members, stop func()) {
	t.Helper()
	m = New(Options{Name: fmt.Sprintf("lb%d", i), Address: node(i), Port: port, Log: slog.New(slog.DiscardHandler)})
	m.SetMACs([]string{fmt.Sprintf("02:00:00:00:00:%02x", i)})
	var peers []netip.Addr
	for k := range n {
		peers = append(peers, node(k+1))
	}
	m.SetPeers(peers)
	setKeys(t, m, keys...)
	return m, must.Run(t, m.Run)
}

func setKeys(t *testing.T, m *Members, keys ...string) {
	t.Helper()
	var list [][]byte
	for _, k := range keys {
		list = append(list, []byte(k))
	}
	must.Do(t, m.SetKeys(list))
}

func alive(m *Members) (names []string) {
	for _, p := range m.Peers(vip) {
		if p.Alive {
			names = append(names, p.Name)
		}
	}
	return names
}

func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		must.Need(t, !time.Now().After(deadline), "waited 20 s for %s", what)
	}
}

// Members find each other, learn each other's claims, and notice when one leaves.
func TestMembers(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 3, "key")
	b, _ := start(t, port, 2, 3, "key")
	c, stop := start(t, port, 3, 3, "key")
	until(t, "the clocks of all members", func() bool {
		return !slices.ContainsFunc(a.Peers(vip), func(p Peer) bool { return p.Within == 0 })
	})
	for _, p := range a.Peers(vip) { // they have one clock
		must.True(t, p.Ahead.Abs() <= p.Within && p.Within < time.Minute, "%s is %v ahead, within %v", p.Name, p.Ahead,
			p.Within)
	}
	want := Claim{Eligible: true, Holds: true, Local: true, Term: 7}
	b.Publish(map[netip.Addr]Claim{vip: want, vip6: {Eligible: true}})
	until(t, "three members", func() bool {
		return slices.Equal(alive(a), []string{"lb2", "lb3"}) && slices.Equal(alive(c), []string{"lb1", "lb2"})
	})
	until(t, "the claim", func() bool {
		p := a.Peers(vip)[0]
		return p.Claim == want && p.Known && a.Peers(vip6)[0].Claim == Claim{Eligible: true}
	})
	must.True(t, !a.Peers(vip)[1].Known, "a member is known that has said nothing")
	until(t, "the MAC address", func() bool {
		p, ok := a.OfMAC("02:00:00:00:00:02")
		return ok && p.Name == "lb2" && p.Address == node(2) && p.Alive
	})
	_, known := a.OfMAC("02:00:00:00:00:09")
	must.True(t, !known, "a foreign MAC address counts as a member's")
	b.Publish(map[netip.Addr]Claim{vip6: {Eligible: true}})
	until(t, "the end of the claim", func() bool { return a.Peers(vip)[0].Claim == Claim{} })
	b.SetMACs([]string{"02:00:00:00:00:77"})
	until(t, "the new MAC address", func() bool { _, ok := a.OfMAC("02:00:00:00:00:77"); return ok })
	start := time.Now()
	stop()
	until(t, "the leave", func() bool { return slices.Equal(alive(a), []string{"lb2"}) })
	t.Logf("a member that leaves is gone after %s", time.Since(start))
	select {
	case <-a.Joined():
	default:
		t.Error("Joined is open although another member has responded")
	}
}

// A member with another key is rejected, and so is one that is not configured. Keys rotate without losing a member.
func TestKeys(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 4, "one")
	b, _ := start(t, port, 2, 4, "one")
	wrong, _ := start(t, port, 3, 4, "another")
	open, _ := start(t, port, 4, 4, string(Unencrypted))
	stranger, _ := start(t, port, 5, 4, "one")
	both := func() bool { return slices.Equal(alive(a), []string{"lb2"}) && slices.Equal(alive(b), []string{"lb1"}) }
	until(t, "two members", both)
	until(t, "the others give up waiting", func() bool {
		for _, m := range []*Members{wrong, open, stranger} {
			select {
			case <-m.Joined():
			default:
				return false
			}
		}
		return true
	})
	for i, keys := range [][]string{{"one", "two"}, {"two", "one"}, {"two", "three"}, {"three", "two"}, {"three"}} {
		for _, m := range []*Members{a, b} {
			setKeys(t, m, keys...)
			claim := Claim{Eligible: true, Term: uint32(i + 1)}
			a.Publish(map[netip.Addr]Claim{vip: claim})
			until(t, "a claim", func() bool { return b.Peers(vip)[0].Claim == claim })
			must.Need(t, both(), "keys %q: members %v and %v", keys, alive(a), alive(b))
		}
	}
	must.Row(t, "keys", 1, len(a.ciphers()))
	setKeys(t, a, "four", "three") // b can no longer read what a sends
	until(t, "only a hears b", func() bool {
		return len(alive(a))+len(alive(b)) == 0 && a.Peers(vip)[0].Heard && !b.Peers(vip)[0].Heard
	})
	time.Sleep(2 * heardFor)
	must.True(t, a.Peers(vip)[0].Heard, "b is no longer heard: %+v", a.Peers(vip)[0])
	for _, m := range []*Members{wrong, open} {
		must.True(t, len(alive(m)) == 0, "%s has members %v", m.o.Name, alive(m))
	}
}

// An encrypted member without a key neither listens nor blocks. It stays alone until it receives one.
func TestKeyComesLater(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 2, "key")
	b := New(Options{Name: "lb2", Address: node(2), Port: port, Log: slog.New(slog.DiscardHandler)})
	b.SetPeers([]netip.Addr{node(1), node(2)})
	must.Run(t, b.Run)
	<-b.Joined()
	must.True(t, len(alive(a))+len(alive(b)) == 0, "members without a key")
	setKeys(t, b, "key")
	until(t, "members", func() bool { return len(alive(a)) == 1 && len(alive(b)) == 1 })
}

// A member and memberlist with the same key and label interoperate, and so do previous versions.
func TestLibraryAsMember(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 2, "key")
	sum := sha256.Sum256([]byte("steelyard members\x00key"))
	c := memberlist.DefaultLANConfig()
	c.Name, c.BindAddr, c.BindPort, c.AdvertisePort = node(2).String(), node(2).String(), int(port), int(port)
	c.Label, c.SecretKey, c.EnableCompression, c.LogOutput = "steelyard", sum[:], false, io.Discard
	b := must.Get(memberlist.Create(c))(t)
	defer b.Shutdown()
	until(t, "the library", func() bool { return slices.Equal(alive(a), []string{node(2).String()}) })
	until(t, "the member", func() bool { return b.NumMembers() == 2 })
}

// Another host's address is an error.
func TestListenFails(t *testing.T) {
	m := New(Options{Name: "x", Address: netip.MustParseAddr("192.0.2.1"), Port: 1, Log: slog.New(slog.DiscardHandler)})
	setKeys(t, m, "key")
	must.True(t, m.Run(t.Context()) != nil, "no error")
	must.True(t, m.SetKeys(nil) != nil, "no error without keys")
}
