package agent

import (
	"bufio"
	"context"
	"encoding/binary"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// 200 readers that request flows over TCP as fast as they can, while the node has more than 100,000, make no health
// check fail.
func TestReadersByTCPDisturbNoHealthCheck(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	site := labtest.Topology(t, lab.Shape{Clients: 1, Balancers: 1, Servers: 4})
	b, client := site.Balancers[0], site.Clients[0]
	var backends []lab.AgentBackend
	for _, s := range site.Servers {
		labtest.TCPEcho(t, s, 8080)
		backends = append(backends, lab.AgentBackend{Address: s.V4})
	}
	vip := ip("203.0.113.10")
	agent := labtest.Agent(t, b.Host, self, lab.AgentConfig{
		Name: "lb1", Interfaces: []string{"eth0"}, Mode: "tc", L2: []string{"eth0"}, MaxFlows: 1_000_000,
		Services: []lab.AgentService{{
			Name: "dns", Addresses: []netip.Addr{vip}, Ports: []string{"53/udp", "54/udp"}, Backends: backends,
			Check: lab.AgentCheck{
				Type: "tcp", Port: 8080, Interval: 300 * time.Millisecond, Timeout: 200 * time.Millisecond,
			},
		}},
		Extra: "[admin]\nlisten = \":9911\"\n",
	})
	waitStatus(t, agent, "the address is announced", func(i admin.Info) bool { return i.Announced == 1 })
	must.Do(t, site.Router.AddRoute(netip.PrefixFrom(vip, 32), b.V4))
	sendFromEveryPort(t, client, vip, 53, 54)
	var flows admin.Flows
	err := agent.Get(t.Context(), "/v1/flows?limit=100000", &flows)
	must.Need(t, err == nil && flows.More, "%d flows, %v", len(flows.Flows), err)
	flows = admin.Flows{}

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var answers [600]atomic.Int32 // by status
	var readers sync.WaitGroup
	for range 200 {
		readers.Go(func() {
			for ctx.Err() == nil {
				status, err := getOnce(ctx, client.Host, b.V4)
				if err == nil {
					answers[status].Add(1)
				}
			}
		})
	}
	readers.Wait()
	must.True(t, !agent.Process().Log.Contains("backend unhealthy"), "readers took a server out of service")
	got, refused := answers[http.StatusOK].Load(), answers[http.StatusServiceUnavailable].Load()
	must.True(t, got != 0 && refused != 0, "%d answers, %d refused; want some of both", got, refused)
	t.Logf("%d answers, %d refused", got, refused)
}

// getOnce requests flows that do not exist, on its own connection, and returns the status.
func getOnce(ctx context.Context, from *lab.Host, to netip.Addr) (int, error) {
	c, err := from.Dial(ctx, "tcp", netip.AddrPortFrom(to, 9911).String())
	if err != nil {
		return 0, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	const text = "GET /v1/flows?state=closed&limit=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
	if _, err := c.Write([]byte(text)); err != nil {
		return 0, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}

// sendFromEveryPort sends a datagram from nearly every port of a client to each of these ports.
func sendFromEveryPort(t *testing.T, client lab.Node, vip netip.Addr, ports ...uint16) {
	t.Helper()
	c := must.Get(client.ListenPacket(t.Context(), "ip4:udp", client.V4.String()))(t)
	defer c.Close()
	for _, port := range ports {
		for source := uint16(1024); source != 0; source++ {
			datagram := binary.BigEndian.AppendUint16(nil, source)
			datagram = binary.BigEndian.AppendUint16(datagram, port)
			datagram = append(datagram, 0, 9, 0, 0, 'x') // length, no checksum
			must.Get(c.WriteTo(datagram, &net.IPAddr{IP: vip.AsSlice()}))(t)
		}
	}
}
