package inside

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// mesh redirects the connections of a pod to a process in it, as service meshes do, except those of that process.
const mesh = `
table inet mesh {
	chain out {
		type nat hook output priority -100;
		meta mark 7 return
		ip daddr 10.96.0.0/16 tcp dport 80 redirect to :15001
		ip6 daddr fd00:96::/64 tcp dport 80 redirect to :15001
	}
}`

// A service mesh in a pod sees the Service's address, and its own connections to it are served.
func TestServiceMesh(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	for _, name := range []string{"p1", "b1"} {
		pod := n.pods[name].Host
		must.Do(t, pod.WriteFile("/run/mesh.nft", mesh, 0o600))
		must.Get(pod.Run(t.Context(), "nft", "-f", "/run/mesh.nft"))(t)
		for network, is4 := range map[string]bool{"tcp4": true, "tcp6": false} {
			to := netip.AddrPortFrom(clusterIP(is4, 1), 80)
			p.apply(n.rule("a:http", to.Addr(), 80, lb.TCP, "q1"))
			seen := make(chan netip.AddrPort, 1)
			go sidecar(t, pod, must.Get(pod.Listen(t.Context(), network, ":15001"))(t), is4, seen)
			if server, _, err := get(t, pod, to); err != nil || server != "q1" {
				t.Errorf("%s from %s: %v, server %q", network, name, err, server)
			}
			select {
			case got := <-seen:
				must.Row(t, network+" from "+name, to, got)
			default:
				t.Errorf("%s from %s: the mesh sees no connection", network, name)
			}
		}
	}
}

// sidecar forwards one connection to where the client has addressed it, and reports that.
func sidecar(t *testing.T, pod *lab.Host, l net.Listener, is4 bool, seen chan<- netip.AddrPort) {
	c, err := l.Accept()
	if err != nil {
		return // the test has ended
	}
	defer c.Close()
	to, err := originalDestination(c.(*net.TCPConn), is4)
	if err != nil {
		t.Error(err)
		return
	}
	seen <- to
	var server net.Conn
	d := net.Dialer{Timeout: 10 * time.Second, Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, 7) })
	}}
	err = pod.Do(func() error { server, err = d.DialContext(t.Context(), "tcp", to.String()); return err })
	if err != nil {
		t.Error(err)
		return
	}
	defer server.Close()
	go io.Copy(server, c)
	io.Copy(c, server)
}

// originalDestination returns the address of a connection before the redirect (SO_ORIGINAL_DST).
func originalDestination(c *net.TCPConn, is4 bool) (to netip.AddrPort, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return to, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		if is4 { // a struct sockaddr_in has the size of this type's first member
			var b *unix.IPv6Mreq
			if b, failed = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST); failed == nil {
				at := b.Multiaddr
				to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(at[4:8])), binary.BigEndian.Uint16(at[2:]))
			}
			return
		}
		var b *unix.IPv6MTUInfo
		if b, failed = unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, unix.SO_ORIGINAL_DST); failed == nil {
			port := binary.BigEndian.AppendUint16(nil, 0)
			binary.NativeEndian.PutUint16(port, b.Addr.Port)
			to = netip.AddrPortFrom(netip.AddrFrom16(b.Addr.Addr), binary.BigEndian.Uint16(port))
		}
	})
	if err == nil {
		err = failed
	}
	return to, err
}

// The checksum of SCTP stays right. Many kernels lack SCTP, so raw sockets exchange the first two chunks.
func TestSCTP(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	to := map[bool]netip.AddrPort{}
	for _, is4 := range []bool{true, false} {
		to[is4] = netip.AddrPortFrom(clusterIP(is4, 1), 3868)
	}
	for i, endpoint := range []string{"p2", "b2", "q1"} {
		port := uint16(5000 + i) // a repeated chunk would belong to the flow of the first
		for network, is4 := range map[string]bool{"ip4:132": true, "ip6:132": false} {
			rule := n.rule("a:sctp", to[is4].Addr(), 3868, lb.SCTP, endpoint)
			p.apply(rule)
			server := must.Get(n.pods[endpoint].ListenPacket(t.Context(), network, ""))(t)
			for name, h := range map[string]*lab.Host{
				"node": n.node, "p1": n.pods["p1"].Host, "b1": n.pods["b1"].Host,
			} {
				client := must.Get(h.ListenPacket(t.Context(), network, ""))(t)
				ask := dptest.Packet{Proto: dptest.SCTP, Type: 1, Seq: 7, Payload: make([]byte, 12),
					Dst: to[is4], Src: netip.AddrPortFrom(to[is4].Addr(), port)} // the kernel chooses the address
				must.Get(client.WriteTo(segment(ask), &net.IPAddr{IP: to[is4].Addr().AsSlice()}))(t)
				from, got := receive(t, server)
				ask.Src = netip.AddrPortFrom(from, binary.BigEndian.Uint16(got))
				ask.Dst = rule.Inside.Endpoints[0]
				must.Row(t, name+" to "+endpoint+" "+network, segment(ask), got)
				answer := dptest.Packet{Proto: dptest.SCTP, Type: 2, Ack: 7, Seq: 8, Payload: ask.Payload,
					Src: ask.Dst, Dst: ask.Src}
				must.Get(server.WriteTo(segment(answer), &net.IPAddr{IP: from.AsSlice()}))(t)
				from, got = receive(t, client)
				must.Row(t, name+" from "+endpoint+" "+network, to[is4].Addr(), from)
				answer.Src, answer.Dst = to[is4], netip.AddrPortFrom(to[is4].Addr(), port)
				must.Row(t, name+" from "+endpoint+" "+network, segment(answer), got)
				client.Close()
			}
			server.Close()
		}
	}
}

// segment returns an SCTP packet without its IP header.
func segment(p dptest.Packet) []byte {
	if p.Dst.Addr().Is4() {
		return p.Frame()[14+20:]
	}
	return p.Frame()[14+40:]
}

// receive returns the source and the content of the next packet.
func receive(t *testing.T, c net.PacketConn) (netip.Addr, []byte) {
	t.Helper()
	must.Do(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
	b := make([]byte, 1500)
	n, from, err := c.ReadFrom(b)
	must.Do(t, err)
	a, _ := netip.AddrFromSlice(from.(*net.IPAddr).IP)
	return a.Unmap(), b[:n]
}
