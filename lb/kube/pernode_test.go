package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func asksPerNode(s *core.Service) {
	s.Annotations = map[string]string{"steelyard.dev/address-per-node": "true"}
}

// A Service gets an address per node, more with more nodes, and keeps them when there are fewer, until it no longer
// asks for them.
func TestAddressPerNode(t *testing.T) {
	addr := netip.MustParseAddr
	a := newAssigner(nil, []Pool{{Pool: lb.Pool{Name: "four", AutoAssign: true, Ranges: []lb.AddrRange{
		{From: addr("203.0.113.1"), To: addr("203.0.113.40")},
	}}}})
	s := wanting("web", asksPerNode)
	for i, step := range []struct {
		nodes  int
		change func(*core.Service)
		want   int
	}{
		{0, same, 1}, {3, same, 3}, {5, same, 5}, {2, same, 5}, {99, same, lb.VIPsPerNodeMax},
		{99, func(s *core.Service) { s.Annotations[perNode[0]] = "false" }, 1},
		{0, asksPerNode, 1},
	} {
		a.nodes = step.nodes
		step.change(s)
		got, err := a.assign(s)
		if err != nil || len(got) != step.want || got[0] != addr("203.0.113.1") {
			t.Errorf("step %d: %v, %v; want %d addresses", i, got, err, step.want)
		}
	}
	for text, want := range map[string]string{
		"3": `steelyard.dev/address-per-node is "3"; write "true"`, "true": "both steelyard.dev/address-per-node and ",
	} {
		s.Annotations = map[string]string{perNode[0]: text, wantAddresses[0]: "203.0.113.7"}
		if _, err := a.assign(s); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v; want %s", text, err, want)
		}
	}
	vips := []netip.Addr{addr("203.0.113.1")}
	view := translate(wanting("web", asksPerNode), vips, nil, topology{}, false, false, 10000)
	if !view.service.VIPPerNode {
		t.Error("nodes do not know that the Service asks for it")
	}
}

// The agent that assigns addresses counts the nodes that may have some, including nodes that appear while it leads, and
// a new leader takes no address back.
func TestAddressPerNodeFollowsNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		excluded := node("n3", "192.0.2.3")
		excluded.Labels[labelExclude] = ""
		web := wanting("web", asksPerNode)
		client := fake.NewClientset(node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), excluded, web)
		ranges := []lb.AddrRange{{From: netip.MustParseAddr("203.0.113.1"), To: netip.MustParseAddr("203.0.113.9")}}
		pools := []Pool{{Pool: lb.Pool{Name: "four", AutoAssign: true, Ranges: ranges}}}
		lead := func() (stop func()) {
			a := NewAllocator(AllocatorOptions{
				Client: client, Node: "n1", Namespace: "steelyard", Pools: pools, PublishNodes: true,
				Log: slog.New(slog.DiscardHandler),
			})
			a.events = record.NewFakeRecorder(20)
			return must.Run(t, func(ctx context.Context) error { a.lead(ctx); return nil })
		}
		step := func(name string, want int) {
			t.Helper()
			pass(3 * time.Second)
			s := must.Get(client.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{}))(t)
			got := statusAddresses(s)
			if len(got) != want || !slices.IsSortedFunc(got, netip.Addr.Compare) {
				t.Errorf("%s: %v; want %d addresses", name, got, want)
			}
		}
		stop := lead()
		step("two nodes that are not excluded", 2)
		for i := 4; i < 6; i++ {
			n := node(fmt.Sprintf("n%d", i), fmt.Sprintf("192.0.2.%d", i))
			client.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{})
		}
		step("two more", 4)
		client.CoreV1().Nodes().Delete(t.Context(), "n4", meta.DeleteOptions{})
		step("one goes", 4)
		stop()
		stop = lead()
		step("another leader", 4)
		stop()
	})
}
