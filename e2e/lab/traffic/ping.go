package traffic

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Ping sends one ICMP echo request and waits for the reply until ctx ends, but at most lab.TimeFactor seconds.
func (c Client) Ping(ctx context.Context, to netip.Addr) error {
	network, request, reply, protocol := "ip4:icmp", icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply), 1
	if to.Is6() {
		network, request, reply, protocol = "ip6:ipv6-icmp", ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply, 58
	}
	conn, err := c.Dial(ctx, network, to.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	deadline := time.Now().Add(lab.TimeFactor * time.Second)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	seq := int(time.Now().UnixMicro() & 0xffff)
	echo := icmp.Echo{ID: os.Getpid() & 0xffff, Seq: seq, Data: []byte("steelyard lab")}
	out, err := (&icmp.Message{Type: request, Body: &echo}).Marshal(nil) // the kernel fills in the checksum of ICMPv6
	if err != nil {
		return err
	}
	if _, err := conn.Write(out); err != nil {
		return fmt.Errorf("ping %s from host %s: %w", to, c.Host, err)
	}
	return awaitReply(conn.(*net.IPConn), protocol, reply, echo)
}

// awaitReply reads until the reply to echo arrives. A raw socket also receives replies to other requests.
func awaitReply(c *net.IPConn, protocol int, reply icmp.Type, echo icmp.Echo) error {
	b := make([]byte, 1500)
	for {
		n, _, err := c.ReadFrom(b) // unlike Read, omits the IPv4 header
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("ping %s: no reply", c.RemoteAddr())
		}
		if err != nil {
			return fmt.Errorf("ping %s: %w", c.RemoteAddr(), err)
		}
		m, err := icmp.ParseMessage(protocol, b[:n])
		if err != nil || m.Type != reply {
			continue
		}
		if got, ok := m.Body.(*icmp.Echo); ok && got.ID == echo.ID && got.Seq == echo.Seq {
			return nil
		}
	}
}
