//go:build environments

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestEnvironments checks the rows of docs/environments.md: for each way to serve Services and to connect pods, a
// scenario of our own, and Kubernetes' tests of LoadBalancers in upstreamSubset.
func TestEnvironments(t *testing.T) {
	must.Do(t, kube.FlannelAvailable(must.Get(filepath.Abs(flannelDir))(t)))
	for _, proxy := range []string{kube.NFTables, kube.IPTables, ""} {
		for _, cni := range []kube.CNI{kube.PTP, kube.Bridge, kube.Flannel} {
			e := kube.Environment{Proxy: proxy, CNI: cni}
			t.Run(e.String(), func(t *testing.T) {
				u := startUpstream(t, 2, true, e)
				t.Run("scenario", u.servesPods)
				t.Run("upstream", func(t *testing.T) { u.runAll(t, upstreamSubset, "") })
			})
		}
	}
}

// echoPod is a pod with Kubernetes' test server.
type echoPod struct {
	name      string
	addresses []netip.Addr
}

// dropInvalid drops packets of no connection that the kernel tracks, as Calico's chains do.
const dropInvalid = `table inet invalid {
	chain input { type filter hook input priority -1; ct state invalid counter drop; }
	chain forward { type filter hook forward priority -1; ct state invalid counter drop; }
}`

// servesPods checks that clients, nodes and pods reach a Service of each policy with a pod on each node.
func (u *upstream) servesPods(t *testing.T) {
	var pods []echoPod
	for i, n := range u.Balancers {
		pods = append(pods, u.startEcho(t, i))
		must.Do(t, n.WriteFile("/run/invalid.nft", dropInvalid, 0o600))
		must.Get(n.Run(t.Context(), "nft", "-f", "/run/invalid.nft"))(t)
		t.Cleanup(func() {
			out, err := n.Run(context.Background(), "nft", "list", "table", "inet", "invalid")
			if t.Failed() {
				t.Logf("%s:\n%s, %v", n, out, err)
			}
			n.Run(context.Background(), "nft", "delete", "table", "inet", "invalid")
		})
	}
	for name, change := range map[string]func(*core.Service){"cluster": func(*core.Service) {}, "local": local} {
		s := u.createService(t, name, func(s *core.Service) {
			change(s)
			s.Spec.Selector = map[string]string{"app": "echo"}
			s.Spec.Ports = []core.ServicePort{
				{Name: "http", Port: 80, TargetPort: intstr.FromInt32(8080)},
				{Name: "udp", Port: 5353, Protocol: core.ProtocolUDP, TargetPort: intstr.FromInt32(5353)},
			}
		})
		t.Cleanup(func() { u.deleteService(t, name) })
		vips := u.waitAddresses(t, name)
		u.waitRouted(t, vips, 0, 1)
		u.waitAnswered(t, vips...)
		for _, vip := range vips {
			u.servesClient(t, name, vip, pods)
		}
		for _, ip := range slices.Concat(s.Spec.ClusterIPs, []string{vips[0].String(), vips[1].String()}) {
			u.servesInside(t, name, netip.MustParseAddr(ip), pods)
		}
		for _, n := range u.Balancers {
			at := netip.AddrPortFrom(n.V4, uint16(s.Spec.Ports[0].NodePort))
			// From another host than the client's: see the limitations in docs/service-proxy.md.
			u.answers(t, name+", node port of "+n.Name(), u.control.Host, at, "hostname", 200)
		}
	}
	for _, n := range u.Balancers {
		out, err := n.Run(t.Context(), binary, "status")
		must.True(t, err == nil && strings.HasPrefix(out, "OK\n") && !strings.Contains(out, "warning"),
			"status of %s: %v\n%s", n, err, out)
	}
}

// startEcho starts a pod on a node, and waits until it is ready.
func (u *upstream) startEcho(t *testing.T, node int) echoPod {
	t.Helper()
	p := echoPod{name: fmt.Sprintf("echo-%d", node)}
	api := u.api.CoreV1().Pods("default")
	soon := int64(1)
	labtest.Until(t, p.name+" is created", func() error { // needs the namespace's ServiceAccount
		_, err := api.Create(t.Context(), &core.Pod{
			ObjectMeta: meta.ObjectMeta{Name: p.name, Labels: map[string]string{"app": "echo"}},
			Spec: core.PodSpec{
				NodeName: u.Balancers[node].Name(), TerminationGracePeriodSeconds: &soon,
				Containers: []core.Container{{
					Name: "echo", Image: "lab/agnhost:2.59",
					Args: []string{"netexec", "--http-port=8080", "--udp-port=5353"},
				}},
			},
		}, meta.CreateOptions{})
		return err
	})
	t.Cleanup(func() { api.Delete(context.Background(), p.name, meta.DeleteOptions{}) })
	labtest.Until(t, p.name+" has an address per family", func() error {
		got, err := api.Get(t.Context(), p.name, meta.GetOptions{})
		if err != nil {
			return err
		}
		p.addresses = nil
		for _, ip := range got.Status.PodIPs {
			p.addresses = append(p.addresses, netip.MustParseAddr(ip.IP))
		}
		return labtest.ErrorIf(len(p.addresses) != 2, "%+v", got.Status)
	})
	return p
}

// servesClient checks that all requests of the client to a VIP are answered, by the pods of both nodes, which see the
// client's address, and that messages larger than the paths' MTU pass.
func (u *upstream) servesClient(t *testing.T, name string, vip netip.Addr, pods []echoPod) {
	t.Helper()
	client, at := u.Clients[0], netip.AddrPortFrom(vip, 80)
	want := client.V4
	if vip.Is6() {
		want = client.V6
	}
	for text := range u.answers(t, name, client.Host, at, "clientip", 200) {
		from, err := netip.ParseAddrPort(text)
		must.True(t, err == nil && from.Addr().Unmap() == want, "%s: %s: a pod sees %s; want %s", name, at, text, want)
	}
	names := u.answers(t, name, client.Host, at, "hostname", 200)
	must.True(t, len(names) == len(pods), "%s: %s: pods %v answer; want all", name, at, names)
	long := strings.Repeat("x", 20_000)
	u.answers(t, name+", long", client.Host, at, "echo?msg="+long, 20)
	for range 40 {
		text, err := askUDP(t.Context(), client.Host, netip.AddrPortFrom(vip, 5353))
		from, errAddr := netip.ParseAddrPort(text)
		must.True(t, err == nil && errAddr == nil && from.Addr().Unmap() == want,
			"%s: %s, UDP: %v, a pod sees %q; want %s", name, at, err, text, want)
	}
}

// servesInside checks that each node and each pod reaches an address of a Service.
func (u *upstream) servesInside(t *testing.T, name string, ip netip.Addr, pods []echoPod) {
	t.Helper()
	at := netip.AddrPortFrom(ip, 80)
	for _, n := range u.Balancers {
		u.answers(t, name+", from "+n.Name(), n.Host, at, "hostname", 20)
	}
	for _, p := range pods {
		const tries = 20
		dial := fmt.Sprintf("dial?request=hostname&protocol=http&host=%s&port=80&tries=%d",
			url.QueryEscape(ip.String()), tries)
		for body := range u.answers(t, name, u.control.Host, netip.AddrPortFrom(p.addresses[0], 8080), dial, 1) {
			var got struct{ Responses, Errors []string }
			err := json.Unmarshal([]byte(body), &got)
			must.True(t, err == nil && len(got.Responses) == tries, "%s: %s from %s: %v, %d of %d answered: %q",
				name, at, p.name, err, len(got.Responses), tries, got.Errors)
		}
	}
}

// answers sends n requests to Kubernetes' test server, each over its own connection, and fails the test unless all are
// answered. It returns the answers.
func (u *upstream) answers(
	t *testing.T, name string, from *lab.Host, at netip.AddrPort, path string, n int,
) map[string]int {
	t.Helper()
	all, failed := map[string]int{}, 0
	var last error
	for range n {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		a, err := traffic.From(from).Get(ctx, "http://"+at.String()+"/"+path)
		cancel()
		if err != nil || a.Status != 200 {
			failed, last = failed+1, fmt.Errorf("%w, status %d", err, a.Status)
			continue
		}
		all[a.Body]++
	}
	must.True(t, failed == 0, "%s: %s: %d of %d requests failed: %v", name, at, failed, n, last)
	return all
}

// askUDP asks Kubernetes' test server for the client's address.
func askUDP(ctx context.Context, from *lab.Host, at netip.AddrPort) (string, error) {
	conn, err := from.Dial(ctx, "udp", at.String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	b := make([]byte, 200)
	if err := conn.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte("clientip")); err != nil {
		return "", err
	}
	n, err := conn.Read(b)
	return string(b[:n]), err
}
