package cluster

import (
	"context"
	"fmt"
	"time"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"golang.org/x/sync/errgroup"
)

// A kubelet's heartbeats: a Lease every ten seconds, and the Node's status every five minutes.
const (
	leaseEvery  = 10 * time.Second
	statusEvery = 5 * time.Minute
	leases      = "kube-node-lease"
)

// each calls f for 0 to n-1, several at a time.
func each(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(32)
	for i := range n {
		g.Go(func() error { return f(ctx, i) })
	}
	return g.Wait()
}

// createNode creates a Node as a kubelet would, including the images that it reports.
func (b *bench) createNode(ctx context.Context, i int) error {
	api := b.api.CoreV1().Nodes()
	n, err := api.Create(ctx, &core.Node{ObjectMeta: meta.ObjectMeta{
		Name: b.nodeName(i), Labels: map[string]string{core.LabelTopologyZone: fmt.Sprintf("zone-%d", i%3)},
	}}, meta.CreateOptions{})
	if err != nil {
		return err
	}
	address := fmt.Sprintf("10.%d.%d.1", 64+i>>8, i&0xff)
	if i == 0 {
		address = b.Balancers[0].V4.String()
	}
	n.Status = core.NodeStatus{
		Addresses:  []core.NodeAddress{{Type: core.NodeInternalIP, Address: address}},
		Conditions: conditions(),
	}
	for k := range 50 { // a kubelet's maximum
		n.Status.Images = append(n.Status.Images, core.ContainerImage{
			Names:     []string{fmt.Sprintf("registry.example/project/image-%d@sha256:%064x", k, k)},
			SizeBytes: 100_000_000,
		})
	}
	if _, err := api.UpdateStatus(ctx, n, meta.UpdateOptions{}); err != nil {
		return err
	}
	lease := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: b.nodeName(i)}}
	_, err = b.api.CoordinationV1().Leases(leases).Create(ctx, lease, meta.CreateOptions{})
	return err
}

func conditions() []core.NodeCondition {
	return []core.NodeCondition{{
		Type: core.NodeReady, Status: core.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: meta.Now(),
	}}
}

// heartbeats sends all nodes' heartbeats, evenly spread, until ctx ends. It counts them.
func (b *bench) heartbeats(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(64)
	tick := time.NewTicker(leaseEvery / time.Duration(b.Nodes))
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return g.Wait()
		case <-tick.C:
		}
		i, round := n%b.Nodes, n/b.Nodes
		g.Go(func() error { return b.heartbeat(ctx, i, round) })
	}
}

func (b *bench) heartbeat(ctx context.Context, i, round int) error {
	now := time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")
	_, err := b.api.CoordinationV1().Leases(leases).Patch(ctx, b.nodeName(i), types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"renewTime":%q}}`, now), meta.PatchOptions{})
	if rounds := int(statusEvery / leaseEvery); err == nil && (round+i)%rounds == 0 {
		const beat = `{"status":{"conditions":[{"type":"Ready","lastHeartbeatTime":%q}]}}`
		_, err = b.api.CoreV1().Nodes().Patch(ctx, b.nodeName(i), types.StrategicMergePatchType,
			fmt.Appendf(nil, beat, time.Now().UTC().Format(time.RFC3339)), meta.PatchOptions{}, "status")
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	b.beats.Add(1)
	return err
}
