package doctor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// answer is what came back for an echo request.
type answer uint8

const (
	silence answer = iota
	replied
	tooBig // a router, or this node's kernel, says so
)

// echo is an echo request, sent with DF, and its answer.
type echo struct {
	to     netip.Addr
	size   int // of the IP packet
	answer answer
}

// Sizes of the headers in bytes.
const (
	ipv4Header = 20
	ipv6Header = 40
	icmpHeader = 8
)

func ipHeader(a netip.Addr) int {
	if a.Is4() {
		return ipv4Header
	}
	return ipv6Header
}

// smallest is the size of echo requests that pass every path.
const smallest = 84

// pace waits after some of the packets of a check, so that 1,000 take half a second. It reports whether there is time
// left. On a busy machine, shorter waits would take longer than they should.
func pace(ctx context.Context, sent int) bool {
	const burst, wait = 32, 16 * time.Millisecond
	return sent%burst != burst-1 || pause(ctx, wait)
}

// ping sends echo requests of both families, waits for the answers, and fills them in. With a valid from, requests have
// this source address, and only those of its family are sent.
func ping(ctx context.Context, from netip.Addr, wait time.Duration, all []*echo) error {
	var errs []error
	for _, is4 := range []bool{true, false} {
		var some []*echo
		for _, e := range all {
			if e.to.Is4() == is4 && (!from.IsValid() || from.Is4() == is4) {
				some = append(some, e)
			}
		}
		if len(some) > 0 {
			errs = append(errs, pingFamily(ctx, is4, from, wait, some))
		}
	}
	return errors.Join(errs...)
}

func pingFamily(ctx context.Context, is4 bool, from netip.Addr, wait time.Duration, all []*echo) error {
	c, err := openICMP(ctx, is4, from)
	if err != nil {
		return err
	}
	defer c.Close()
	id := uint16(rand.Uint32())
	var sending sync.WaitGroup
	sending.Go(func() {
		for seq, e := range all {
			message := echoRequest(e.to, e.size, id, uint16(seq))
			_, err := c.WriteTo(message, &net.IPAddr{IP: e.to.AsSlice(), Zone: e.to.Zone()})
			if errors.Is(err, syscall.EMSGSIZE) {
				e.answer = tooBig
			}
			if !pace(ctx, seq) {
				break
			}
		}
		c.SetReadDeadline(soon(ctx, wait)) // ends receive
	})
	receive(c, is4, id, all)
	sending.Wait()
	return nil
}

// openICMP opens a raw socket that sends packets with DF, as large as the interface permits, whatever the kernel knows
// about the path.
func openICMP(ctx context.Context, is4 bool, from netip.Addr) (net.PacketConn, error) {
	network, level, option, value := "ip4:icmp", unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE
	if !is4 {
		network, level = "ip6:ipv6-icmp", unix.IPPROTO_IPV6
		option, value = unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE
	}
	var set error
	l := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		err := raw.Control(func(fd uintptr) {
			set = errors.Join(unix.SetsockoptInt(int(fd), level, option, value),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<20))
		})
		return errors.Join(err, set)
	}}
	address := ""
	if from.IsValid() {
		address = from.String()
	}
	c, err := l.ListenPacket(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("open a raw socket: %w", err)
	}
	return c, nil
}

// echoRequest returns an ICMP message for an IP packet of this size. The kernel fills in the checksum of ICMPv6.
func echoRequest(to netip.Addr, size int, id, seq uint16) []byte {
	var kind icmp.Type = ipv4.ICMPTypeEcho
	if to.Is6() {
		kind = ipv6.ICMPTypeEchoRequest
	}
	body := &icmp.Echo{ID: int(id), Seq: int(seq), Data: make([]byte, size-ipHeader(to)-icmpHeader)}
	text, _ := (&icmp.Message{Type: kind, Body: body}).Marshal(nil) // never fails for an Echo
	return text
}

// receive fills in answers until the deadline of the socket.
func receive(c net.PacketConn, is4 bool, id uint16, all []*echo) {
	b := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(b) // omits the IPv4 header
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an error of one packet
		}
		m, ok := parseICMP(is4, b[:n])
		if !ok || m.id != id || int(m.seq) >= len(all) {
			continue
		}
		e := all[m.seq]
		sender, _ := netip.AddrFromSlice(from.(*net.IPAddr).IP)
		switch {
		case m.reply && sender.Unmap() == e.to.WithZone(""):
			e.answer = replied
		case m.tooBig:
			e.answer = tooBig
		}
	}
}

// icmpAnswer is an echo reply, or an error about an echo request.
type icmpAnswer struct {
	reply, tooBig, noRoute bool
	id, seq                uint16
	to                     netip.Addr // of the request that an error quotes
}

// parseICMP parses a message without the IP header.
func parseICMP(is4 bool, b []byte) (a icmpAnswer, ok bool) {
	if len(b) < icmpHeader {
		return a, false
	}
	kind, code, quoted := b[0], b[1], b[icmpHeader:]
	echo := b
	switch {
	case is4 && kind == byte(ipv4.ICMPTypeEchoReply), !is4 && kind == byte(ipv6.ICMPTypeEchoReply):
		a.reply = true
	case is4 && kind == byte(ipv4.ICMPTypeDestinationUnreachable):
		a.tooBig, a.noRoute = code == 4, code <= 1 // RFC 792: 0 net, 1 host unreachable, 4 fragmentation needed
	case !is4 && kind == byte(ipv6.ICMPTypePacketTooBig):
		a.tooBig = true
	case !is4 && kind == byte(ipv6.ICMPTypeDestinationUnreachable):
		a.noRoute = code == 0 || code == 3 // RFC 4443: 0 no route, 3 address unreachable
	default:
		return a, false
	}
	if !a.reply {
		header := ipv6Header
		if is4 && len(quoted) > 0 {
			header = int(quoted[0]&15) * 4
		}
		if len(quoted) < max(header, ipv4Header)+icmpHeader {
			return a, false
		}
		if is4 {
			a.to, _ = netip.AddrFromSlice(quoted[16:20])
		} else {
			a.to, _ = netip.AddrFromSlice(quoted[24:40])
		}
		echo = quoted[header:]
	}
	a.id, a.seq = binary.BigEndian.Uint16(echo[4:]), binary.BigEndian.Uint16(echo[6:])
	return a, true
}
