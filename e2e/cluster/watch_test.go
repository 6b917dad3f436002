package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestServiceProxyCrashes kills the agent of a node without kube-proxy five times. With the watcher, which has the
// capabilities of its unit, no DNS request and no API call of a pod fails, not even those of pods that start without an
// agent.
func TestServiceProxyCrashes(t *testing.T) {
	c := newCluster(t, "tunnel", false)
	const node = 2
	n, agent := c.Balancers[node], c.Agents[node]
	s := c.createService(t, "dns", func(s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP })
	old := c.startPod(t, "old", node)
	c.setEndpoints(t, "dns", c.startPod(t, "remote", 1), old)
	api := must.Get(c.api.CoreV1().Services("default").Get(t.Context(), "kubernetes", meta.GetOptions{}))(t)
	ask := func(h *lab.Host) error {
		ctx, cancel := context.WithTimeout(t.Context(), lab.Ready)
		defer cancel()
		err := callAPI(ctx, h, api.Spec.ClusterIP)
		for _, ip := range s.Spec.ClusterIPs {
			to := netip.AddrPortFrom(netip.MustParseAddr(ip), 5353)
			err = errors.Join(err, traffic.From(h).UDP(ctx, to, 1, 1, 30*time.Second).Err())
		}
		return err
	}
	masquerade := fmt.Sprintf("add table ip cni; add chain ip cni post { type nat hook postrouting priority 100; }; "+
		"add rule ip cni post ip saddr 10.244.0.0/16 ip daddr %s masquerade", c.Servers[0].V4)
	must.Get(n.Run(t.Context(), "nft", masquerade))(t)
	labtest.Until(t, "the node serves", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := traffic.From(old.Host).Get(ctx, fmt.Sprintf("http://%s/", net.JoinHostPort(s.Spec.ClusterIP, "80")))
		return errors.Join(err, callAPI(ctx, old.Host, api.Spec.ClusterIP))
	})
	status := func(want string) error {
		out, err := agent.CLI(t.Context(), "proxy", "status")
		return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, want), "%s", out))
	}
	must.Do(t, status("not served while the agent is not running"))
	watcher := must.Get(n.Start(lab.Command{Path: "setpriv", Args: []string{
		"--no-new-privs", "--bounding-set=-all,+bpf,+net_admin", "--", binary, "proxy", "watch",
	}}))(t)
	labtest.Until(t, "the watcher runs", func() error { return status("served even while the agent is not running") })

	before := synsLost(t, old.Host)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	g, asked := new(errgroup.Group), 0
	g.Go(func() error {
		for ; ctx.Err() == nil; asked++ {
			if err := ask(old.Host); err != nil {
				return err
			}
			time.Sleep(20 * time.Millisecond) // so that the table of flows does not fill
		}
		return nil
	})
	for i := range 5 {
		agent.Kill()
		fresh := c.startPod(t, fmt.Sprint("fresh", i), node)
		labtest.Until(t, "its device has the programs, long before a container could start", func() error {
			out, err := n.Run(t.Context(), "tc", "filter", "show", "dev", fresh.name, "ingress")
			return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, "sy_inside_in"), "%q", out))
		})
		must.Do(t, ask(fresh.Host))
		must.Equal(t, "0", synsLost(t, fresh.Host))
		must.Do(t, agent.Start())
		must.Do(t, agent.WaitReady(t.Context(), lab.Ready))
		must.Do(t, ask(fresh.Host))
	}
	stop()
	must.Do(t, g.Wait())
	must.Equal(t, before, synsLost(t, old.Host))
	memory := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", watcher.Pid())))(t)
	t.Logf("%d times three requests of a pod were answered; memory of the watcher:\n%s", asked, memory)
	must.True(t, !watcher.Log.Contains("level=ERROR"), "%s", watcher.Log.Tail(20))
	must.Do(t, watcher.Stop())
}

// callAPI makes a call to the API server at a ClusterIP over a new connection.
func callAPI(ctx context.Context, h *lab.Host, clusterIP string) error {
	client := &http.Client{Transport: &http.Transport{
		DialContext: h.Dial, DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	url := "https://" + net.JoinHostPort(clusterIP, "443") + "/api"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := client.Do(request) // without a token, the status is 401 or 403
	if err != nil {
		return err
	}
	return answer.Body.Close()
}

// synsLost returns how many SYNs a host has sent again.
func synsLost(t *testing.T, h *lab.Host) string {
	t.Helper()
	fields := strings.Fields(must.Get(h.Run(t.Context(), "nstat", "-asz", "TcpExtTCPSynRetrans"))(t))
	must.Need(t, len(fields) > 1, "nstat: %q", fields)
	return fields[len(fields)-2]
}
