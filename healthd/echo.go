package healthd

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"net"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// echoChecker sends an ICMP echo request to the VIP through another node, whose datapath replies (RFC 792, RFC 4443). A
// reply proves that the node and the tunnel to it work, whatever else runs there. It needs CAP_NET_RAW.
type echoChecker struct{ target }

const (
	protocolICMP  = 1 // IANA numbers
	protocolICMP6 = 58
)

func (c echoChecker) Probe(ctx context.Context) (Result, error) {
	network, protocol := "ip4:icmp", protocolICMP
	var request, reply icmp.Type = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	if c.VIP.Is6() {
		network, protocol = "ip6:ipv6-icmp", protocolICMP6
		request, reply = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	d, to, err := c.dialer(network)
	if err != nil {
		return Result{}, err
	}
	conn, err := d.DialContext(ctx, network, to.Addr().String())
	if err != nil {
		return Result{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	token := make([]byte, 16) // distinguishes replies of other nodes, which also come from the VIP
	rand.Read(token)
	message := icmp.Message{Type: request, Body: &icmp.Echo{ID: int(token[0])<<8 | int(token[1]), Data: token}}
	b, err := message.Marshal(nil)
	if err != nil {
		return Result{}, err
	}
	if _, err := conn.Write(b); err != nil {
		return Result{}, err
	}
	answers := conn.(net.PacketConn)     // Read of conn would return the IPv4 header
	for answer := make([]byte, 128); ; { // until ctx's deadline
		n, _, err := answers.ReadFrom(answer)
		if err != nil {
			return Result{}, errors.Join(err, ctx.Err())
		}
		m, err := icmp.ParseMessage(protocol, answer[:n])
		if err != nil || m.Type != reply {
			continue
		}
		if echo, is := m.Body.(*icmp.Echo); is && bytes.Equal(echo.Data, token) {
			return ok("echo reply")
		}
	}
}
