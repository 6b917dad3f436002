package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mdlayher/packet"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestMain runs the tests in a child process with its own network namespace, because the checks use many threads.
func TestMain(m *testing.M) {
	const child = "DOCTOR_TEST_CHILD"
	if os.Getenv(child) != "" || os.Geteuid() != 0 {
		if os.Geteuid() != 0 && os.Getenv("STEELYARD_CI") != "" {
			fmt.Fprintln(os.Stderr, "network namespaces need root, and STEELYARD_CI forbids skipping")
			os.Exit(1)
		}
		os.Exit(m.Run()) // without root, inNamespace skips
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), child+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// inNamespace enables the loopback interface, and adds links that lose all packets.
func inNamespace(t *testing.T, links ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: network namespaces need root")
	}
	must.Do(t, netlink.LinkSetUp(must.Get(netlink.LinkByName("lo"))(t)))
	for _, name := range links {
		link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}
		must.Do(t, netlink.LinkAdd(link))
		t.Cleanup(func() { must.Do(t, netlink.LinkDel(link)) })
		must.Do(t, netlink.LinkSetUp(link))
	}
}

// The larger of the values of a link and of "all" applies.
func TestStrictARP(t *testing.T) {
	inNamespace(t, "uplink", "other", "kube-ipvs0")
	vip := netip.MustParseAddr("203.0.113.10")
	must.Do(t, netlink.AddrAdd(must.Get(netlink.LinkByName("kube-ipvs0"))(t), must.Get(netlink.ParseAddr(
		vip.String()+"/32"))(t)))
	n := &Node{
		AskOwn: func(context.Context) []lb.Finding { return nil }, Links: []string{"uplink"},
		Status: lb.Status{Routes: []lb.RouteStatus{{Address: vip}}},
	}
	for _, tt := range []struct {
		all, uplink, other string
		faults             int
	}{{"0", "0", "0", 1}, {"0", "0", "1", 1}, {"1", "0", "0", 0}, {"0", "1", "0", 0}} {
		for name, value := range map[string]string{"all": tt.all, "uplink": tt.uplink, "other": tt.other} {
			must.Do(t, os.WriteFile("/proc/sys/net/ipv4/conf/"+name+"/arp_ignore", []byte(value), 0o644))
		}
		found, notAsked := strictARP(t.Context(), n)
		must.True(t, len(found) == tt.faults && notAsked == "", "%+v: %+v, %q", tt, found, notAsked)
	}
}

// Other traffic of the node does not fill the sockets for answers.
func TestSocketsForAnswers(t *testing.T) {
	inNamespace(t)
	lo := must.Get(net.InterfaceByName("lo"))(t)
	for _, host := range []string{"127.0.0.1", "::1"} {
		is4, protocol, port := true, unix.ETH_P_IP, uint16(40000)
		if host == "::1" {
			is4, protocol = false, unix.ETH_P_IPV6
		}
		filter := must.Get(bpf.Assemble(tcpTo(is4, port)))(t)
		behind := must.Get(openTCP(t.Context(), is4, filter))(t)
		defer behind.Close()
		before := must.Get(packet.Listen(lo, packet.Datagram, protocol, &packet.Config{Filter: filter}))(t)
		defer before.Close()
		l := must.Get(net.Listen("tcp", net.JoinHostPort(host, "0")))(t)
		other := must.Get(net.Dial("tcp", l.Addr().String()))(t)
		must.Get(other.Write(bytes.Repeat([]byte("x"), 100)))(t)
		other.Close()
		l.Close()
		_, err := net.Dial("tcp", net.JoinHostPort(host, fmt.Sprint(port)))
		must.True(t, err != nil, "port %d is in use", port)
		b := make([]byte, 1<<16)
		read := func(c net.PacketConn) []byte {
			must.Do(t, c.SetReadDeadline(time.Now().Add(5*time.Second)))
			n, _, err := c.ReadFrom(b)
			must.Do(t, err)
			return b[:n]
		}
		toPort := func(segment []byte) bool {
			return len(segment) >= 20 && binary.BigEndian.Uint16(segment[2:]) == port
		}
		first := read(behind)
		must.True(t, toPort(first), "%s: received % x", host, first)
		first = read(before)
		_, segment, _ := tcpOf(first)
		must.True(t, toPort(segment), "%s: arrived % x", host, first)
	}
}

// Sessions that this process opens while the check runs are its own.
func TestOwnSessions(t *testing.T) {
	inNamespace(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	to := netip.MustParseAddrPort(l.Addr().String())
	n := &Node{Peers: []Peer{{PeerStatus: lb.PeerStatus{Peer: to.Addr()}, Port: to.Port()}}}
	ctx, cancel := context.WithCancel(t.Context())
	var opening sync.WaitGroup
	defer opening.Wait()
	defer cancel()
	opening.Go(func() {
		for range 2000 {
			c, err := net.Dial("tcp", to.String())
			if err != nil || !pause(ctx, time.Millisecond/2) {
				break
			}
			defer c.Close()
			if there, err := l.Accept(); err == nil {
				defer there.Close()
			}
		}
		<-ctx.Done() // a session that ends within a check looks like another program's
	})
	for range 30 {
		found, _ := speakers(t.Context(), n)
		must.Need(t, len(found) == 0, "%+v", found)
	}
}

// Silent routers are asked at the same time, and not for longer than there is time.
func TestManyRouters(t *testing.T) {
	inNamespace(t, "uplink")
	link := must.Get(netlink.LinkByName("uplink"))(t)
	must.Do(t, netlink.AddrAdd(link, must.Get(netlink.ParseAddr("192.0.2.1/24"))(t)))
	vip := netip.MustParsePrefix("203.0.113.10/32")
	n := &Node{Status: lb.Status{Routes: []lb.RouteStatus{{Address: vip.Addr(), Announced: true}}}}
	for i := range byte(24) {
		peer := netip.AddrFrom4([4]byte{192, 0, 2, 10 + i})
		must.Do(t, netlink.NeighAdd(&netlink.Neigh{
			LinkIndex: link.Attrs().Index, IP: peer.AsSlice(), State: netlink.NUD_PERMANENT,
			HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, i},
		}))
		n.Peers = append(n.Peers, Peer{
			PeerStatus: lb.PeerStatus{Peer: peer, Session: &lb.PeerSession{}}, External: true,
			Sent: []lb.SentRoute{{Prefix: vip, At: time.Now().Add(-time.Hour)}},
		})
	}
	for limit, most := range map[time.Duration]time.Duration{
		time.Minute: 3 * time.Second, 100 * time.Millisecond: 900 * time.Millisecond,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		start := time.Now()
		found, notAsked := routers(ctx, n)
		took := time.Since(start)
		cancel()
		must.True(t, len(found) == 0 && notAsked == "" && took < most, "%v, %q after %s", found, notAsked, took)
	}
}

// Many are asked at the same time, and running out of time is no proof.
func TestFailing(t *testing.T) {
	refuses := func(s string) bool { return strings.HasPrefix(s, "ok") }
	must.Equal(t, []string{"a", "b"}, failing(t.Context(), []string{"a", "ok", "b", "ok"}, refuses))
	start := time.Now()
	slow := failing(t.Context(), make([]string, 20), func(string) bool {
		time.Sleep(200 * time.Millisecond)
		return false
	})
	must.True(t, len(slow) == 20 && time.Since(start) < 2*time.Second, "%d after %s", len(slow), time.Since(start))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	late := failing(ctx, make([]string, 20), func(string) bool {
		<-ctx.Done()
		return false
	})
	must.True(t, len(late) == 0, "%d have failed", len(late))
}
