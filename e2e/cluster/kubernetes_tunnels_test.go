package cluster

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	endian "encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// forgedTunnels has a process that is not the agent send tunnel packets from one node to another, as pods behind
// masquerading can. Inside is a datagram that claims to come from a client. If it were delivered, the pod would reply
// to that client.
func forgedTunnels(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "forged", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	c.changeKeys(t, func(data map[string][]byte) { data["required"] = []byte("true") })
	for i, vip := range vips {
		f := newForger(t, c, i, vip)
		f.refused(t, "as any process", 0, 0, 1, "tunnel_spoofed")
		f.refused(t, "without a key", ourMark, 0, 0, "tunnel_key_mismatch")
		f.refused(t, "with another key", ourMark, 1, 0, "tunnel_key_mismatch")
		if !f.answered(t, ourMark, f.token(t)) { // otherwise the other cases prove nothing
			t.Errorf("%s: no answer to a packet with the mark and the key of the agents", vip)
		}
		c.updateService(t, "forged", func(s *core.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8", "2001:db8:dead::/48"}
		})
		c.waitUnserved(t, vips[i:i+1], timesOut)
		f.next++ // a known flow would continue
		f.refused(t, "with the key, from a source that is not allowed", ourMark, f.token(t), 0, "not_allowed")
		c.updateService(t, "forged", func(s *core.Service) { s.Spec.LoadBalancerSourceRanges = nil })
		c.waitAnswered(t, vip)
	}
}

// keysRotate rotates the keys three times, until none of the first ones is left. Nodes must still reach each other.
func keysRotate(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "keys", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	was := c.changeKeys(t, func(data map[string][]byte) { data["required"] = []byte("true") })
	for range 3 {
		c.changeKeys(t, func(data map[string][]byte) { delete(data, "rotated") })
		labtest.Until(t, "the keys are rotated", func() error {
			now := c.keys(t)
			if !bytes.Equal(now["previous"], was["current"]) || !bytes.Equal(now["seed"], was["seed"]) {
				return errors.New("the old key is not the previous one, or the seed differs")
			}
			return nil
		})
		was = c.keys(t)
		c.waitAnswered(t, vips...)
		for _, vip := range vips {
			r := c.Load(t, vip, 40)
			must.True(t, r.Err() == nil, "%s: %s, %v", vip, r, r.Err())
		}
	}
}

func (c *cluster) keys(t *testing.T) map[string][]byte {
	t.Helper()
	s := must.Get(c.api.CoreV1().Secrets("steelyard").Get(t.Context(), "steelyard-tunnel-keys", meta.GetOptions{}))(t)
	return s.Data
}

// changeKeys changes the Secret's data and returns the previous data.
func (c *cluster) changeKeys(t *testing.T, change func(map[string][]byte)) map[string][]byte {
	t.Helper()
	was := c.keys(t)
	api := c.api.CoreV1().Secrets("steelyard")
	labtest.Until(t, "the Secret is changed", func() error {
		s, err := api.Get(t.Context(), "steelyard-tunnel-keys", meta.GetOptions{})
		if err != nil {
			return err
		}
		change(s.Data)
		_, err = api.Update(t.Context(), s, meta.UpdateOptions{})
		return err
	})
	return was
}

// ourMark is the mark on our programs' packets (TUNNEL_MARK in datapath/bpf).
const ourMark = 0x53580000

// forger sends tunnel packets from node 1 to node 0, containing datagrams from the client to a VIP.
type forger struct {
	c        *cluster
	vip      netip.Addr
	from, to netip.Addr
	client   netip.Addr
	next     uint16 // the next client port
}

func newForger(t *testing.T, c *cluster, family int, vip netip.Addr) *forger {
	t.Helper()
	f := &forger{c: c, vip: vip, next: 30000}
	f.from, f.to = c.Balancers[1].At(0)[family].Addr(), c.Balancers[0].At(0)[family].Addr()
	f.client = c.Clients[0].V4
	if vip.Is6() {
		f.client = c.Clients[0].V6
	}
	return f
}

// token returns the current key's token, as computed by datapath.
func (f *forger) token(t *testing.T) uint64 {
	t.Helper()
	sum := sha256.Sum256(append([]byte("steelyard tunnel token\x00"), f.c.keys(t)["current"]...))
	return endian.BigEndian.Uint64(sum[:])
}

// answered sends packets with a mark and a token, and reports whether the client receives a response.
func (f *forger) answered(t *testing.T, mark int, token uint64) bool {
	t.Helper()
	client := netip.AddrPortFrom(f.client, f.next)
	socket := must.Get(f.c.Clients[0].ListenPacket(t.Context(), "udp", client.String()))(t)
	defer socket.Close()
	inner := dptest.Packet{
		Src: client, Dst: netip.AddrPortFrom(f.vip, 5353), Proto: dptest.UDP, Payload: []byte("forged"),
	}
	private := make([]byte, 12)
	private[0], private[2] = 0x5d, 1 // relayed, so the receiver delivers
	endian.LittleEndian.PutUint64(private[4:], token)
	payload := dptest.GUE(inner, private...)
	deadline := time.Now().Add(3 * time.Second)
	for time.Now().Before(deadline) {
		f.send(t, mark, payload)
		socket.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		if n, _, err := socket.ReadFrom(make([]byte, 100)); err == nil && n > 0 {
			return true
		}
	}
	return false
}

func (f *forger) send(t *testing.T, mark int, payload []byte) {
	t.Helper()
	must.Do(t, f.c.Balancers[1].Do(func() error {
		d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			control := raw.Control(func(fd uintptr) {
				err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_MARK, mark)
			})
			return errors.Join(control, err)
		}}
		conn, err := d.Dial("udp", netip.AddrPortFrom(f.to, 6090).String())
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write(payload)
		if errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.EPERM) { // dropped at egress
			return nil
		}
		return err
	}))
}

// refused checks that no response arrives, and that a node drops the packets for this reason.
func (f *forger) refused(t *testing.T, when string, mark int, token uint64, node int, reason string) {
	t.Helper()
	before := f.drops(t, node, reason)
	must.True(t, !f.answered(t, mark, token), "%s, %s: the client got an answer", f.vip, when)
	labtest.Until(t, fmt.Sprintf("%s: %s counts %s", when, f.c.Balancers[node].Name(), reason),
		func() error {
			now := f.drops(t, node, reason)
			return labtest.ErrorIf(now == before, "it is still\n%s", now)
		})
}

// drops returns a node's drop metrics with this reason.
func (f *forger) drops(t *testing.T, node int, reason string) string {
	t.Helper()
	var lines []string
	for line := range strings.Lines(labtest.Metrics(t, f.c.Agents[node], "steelyard_datapath_packets_total")) {
		if strings.Contains(line, `"`+reason+`"`) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// TestControlPlaneAddress covers a control plane whose address the nodes announce. All nodes boot simultaneously and
// can reach the API server only at that address. They announce what they last knew, reach the API server through each
// other, and follow the cluster again.
func TestControlPlaneAddress(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "nat", false)
	vip := c.startAPIService(t)
	c.waitRouted(t, []netip.Addr{vip}, 0, 1, 2)
	c.waitAPI(t, vip)
	old := c.control.URL()
	through := "https://" + netip.AddrPortFrom(vip, 6443).String()
	for _, p := range c.allocators { // from now on, the nodes assign addresses
		must.Do(t, p.Signal(syscall.SIGTERM))
	}
	for i, a := range c.Agents {
		labtest.Until(t, "the state is stored", func() error {
			text, err := a.ReadFile("/run/steelyard/cluster.json")
			return errors.Join(err, labtest.ErrorIf(!strings.Contains(text, "apiserver"), "the service is not in it"))
		})
		must.Do(t, a.Terminate(t.Context(), 20*time.Second))
		must.Get(a.CLI(t.Context(), "cleanup", "--without-proxy"))(t) // as after a reboot
		text := strings.ReplaceAll(c.control.Kubeconfig(), old, through)
		must.Do(t, c.Balancers[i].WriteFile(kube.KubeconfigPath, text, 0o600))
		must.Do(t, a.Configure(strings.Replace(c.Config[i].TOML(), "allocate = false\n", "", 1)))
	}
	c.waitRouted(t, []netip.Addr{vip})
	must.Do(t, c.Agents[0].Start())
	c.waitRouted(t, []netip.Addr{vip}, 0)
	c.waitFollowing(t, c.Agents[0])
	c.createService(t, "first", func(*core.Service) {})
	c.waitAddresses(t, "first")
	// The first node's connections move to other nodes, which have no flows for them.
	for _, a := range c.Agents[1:] {
		must.Do(t, a.Start())
	}
	c.waitRouted(t, []netip.Addr{vip}, 0, 1, 2)
	c.waitAPI(t, vip)
	c.createService(t, "later", func(*core.Service) {})
	c.waitAddresses(t, "later")
	c.waitFollowing(t, c.Agents...)
}

// waitFollowing waits until agents are connected to the API server.
func (c *cluster) waitFollowing(t *testing.T, agents ...*lab.Agent) {
	t.Helper()
	for _, a := range agents {
		labtest.Within(t, 3*time.Minute, "the agent follows the cluster", func() error {
			out, err := a.CLI(t.Context(), "status")
			return errors.Join(err, labtest.ErrorIf(strings.Contains(out, "API server has not answered"), "%s", out))
		})
	}
}

// startAPIService creates a Service whose endpoint is the API server, and returns its address.
func (c *cluster) startAPIService(t *testing.T) netip.Addr {
	t.Helper()
	const name, port = "apiserver", 6443
	single := core.IPFamilyPolicySingleStack
	c.createService(t, name, func(s *core.Service) {
		s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = &single, []core.IPFamily{core.IPv4Protocol}
		s.Spec.Ports = []core.ServicePort{{Name: "https", Port: port, TargetPort: intstr.FromInt32(port)}}
	})
	portName, number, tcp, ready := "https", int32(port), core.ProtocolTCP, true
	slice := &discovery.EndpointSlice{
		ObjectMeta: meta.ObjectMeta{
			Name: name, Namespace: "default", Labels: map[string]string{discovery.LabelServiceName: name},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &portName, Port: &number, Protocol: &tcp}},
		Endpoints: []discovery.Endpoint{{
			Addresses: []string{c.control.Address.String()}, Conditions: discovery.EndpointConditions{Ready: &ready},
		}},
	}
	must.Get(c.api.DiscoveryV1().EndpointSlices("default").Create(t.Context(), slice, meta.CreateOptions{}))(t)
	return c.waitAddresses(t, name)[0]
}

// waitAPI waits until the API server responds to the client at a VIP.
func (c *cluster) waitAPI(t *testing.T, vip netip.Addr) {
	t.Helper()
	client := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return c.Clients[0].Dial(ctx, network, addr)
		},
	}}
	at := fmt.Sprintf("https://%s/version", netip.AddrPortFrom(vip, 6443))
	labtest.Until(t, at+" answers", func() error {
		resp, err := client.Get(at)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err == nil && !strings.Contains(string(text), "Status") && !strings.Contains(string(text), "gitVersion") {
			err = lab.Permanent(fmt.Errorf("%s: %s", resp.Status, text))
		}
		return err
	})
}
