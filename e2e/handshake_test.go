package e2e

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestHandshakes checks that one command names the server that answers clients' SYNs late, although its health checks
// are fast, and that the figures of a flow are those of the client's socket.
func TestHandshakes(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newCheckedSite(t, peers.BIRD, mode, 1, 3, patient)
			a, slow := s.Agents[0], s.Servers[1]
			// Health checks have the ephemeral ports of the balancer, which nat does not use.
			must.Do(t, slow.Drop(t.Context(), "input",
				"tcp dport 8080 tcp sport != 32768-60999 tcp flags & (syn | ack) == syn numgen inc mod 3 == 0"))
			const requests = 30
			for _, vip := range vips {
				load := traffic.Load{URL: labtest.URL(vip), Requests: requests, Timeout: lab.Ready}
				must.Do(t, s.Client().Load(t.Context(), load).Err())
			}
			isSlow := func(text string) bool {
				return strings.Contains(text, slow.V4.String()) || strings.Contains(text, slow.V6.String())
			}
			out := must.Get(a.CLI(t.Context(), "top", "--sort", "handshake"))(t)
			_, table, _ := strings.Cut(out[strings.LastIndex(out, "SERVICE  BACKEND"):], "\n")
			first, _, _ := strings.Cut(table, "\n")
			must.True(t, isSlow(first), "top lists another server first:\n%s", out)
			out = must.Get(a.CLI(t.Context(), "backends", "web"))(t)
			for line := range strings.Lines(out[strings.Index(out, "\n")+1:]) {
				f := strings.Fields(line)
				took, err := time.ParseDuration(f[11]) // HANDSHAKE
				named := took > 500*time.Millisecond
				must.True(t, err == nil && took > 0 && named == isSlow(line), "%v:\n%s", err, out)
			}
			counted := 0
			for line := range strings.Lines(labtest.Metrics(t, a, "steelyard_backend_handshake_seconds_count")) {
				_, n, _ := strings.Cut(strings.TrimSpace(line), "} ")
				counted += must.Get(strconv.Atoi(n))(t)
			}
			must.Row(t, "handshakes", requests*len(vips), counted)
			for _, vip := range vips {
				s.checkFlow(t, vip)
			}
		})
	}
}

// checkFlow checks the figures of a flow while its connection is open.
func (s *site) checkFlow(t *testing.T, vip netip.Addr) {
	t.Helper()
	c := must.Get(s.Client().Dial(t.Context(), "tcp", netip.AddrPortFrom(vip, 9000).String()))(t)
	defer c.Close()
	r := bufio.NewReader(c)
	sent, received := 0, 0
	for i := range 300 {
		n := must.Get(c.Write(append(bytes.Repeat([]byte("x"), i), '\n')))(t)
		answer := must.Get(r.ReadString('\n'))(t)
		sent, received = sent+n, received+len(answer)
	}
	labtest.Until(t, "the figures agree", func() error {
		info := must.Get(tcpInfo(c))(t)
		var all admin.Flows
		err := s.Agents[0].Get(t.Context(), "/v1/flows?port=9000&state=established&address="+vip.String(), &all)
		if err != nil || len(all.Flows) != 1 {
			return fmt.Errorf("%w: %+v; want one flow", err, all.Flows)
		}
		f := all.Flows[0]
		ok := f.FromClient.Bytes == uint64(sent) && f.FromServer.Bytes == uint64(received) &&
			f.FromClient.Packets == uint64(info.Segs_out) && f.FromServer.Packets == uint64(info.Segs_in) &&
			f.FromClient.Retransmissions == info.Total_retrans && f.Age > 0 && f.Age < 600 && f.Handshake > 0
		return labtest.ErrorIf(!ok, "sent %d, received %d, segments %d, %d: %+v", sent, received, info.Segs_out,
			info.Segs_in, f)
	})
}

func tcpInfo(c net.Conn) (info *unix.TCPInfo, err error) {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	errControl := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	return info, errors.Join(err, errControl)
}
