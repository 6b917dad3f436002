package kube

import (
	"context"
	"fmt"
	"hash/fnv"
	"net/netip"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// With tunnels, every node needs the addresses of all other nodes. Kubernetes has them only in the Node objects. Each
// Node changes at least every five minutes and lists the node's images, so each of a thousand nodes would receive and
// decode all others' updates. The agent that assigns addresses therefore reads the Nodes and writes what others need
// into the node table: ConfigMaps that change only when a node is added or deleted or changes its address. There are
// several, to keep each update small.

// nodeShards is the number of ConfigMaps of the node table. Until all exist, there is no table.
const nodeShards = 16

// tableRetry bounds the retry delay of a client that may not read the table.
const tableRetry = 5 * time.Minute

// labelNodeTable selects the ConfigMaps of the node table.
const labelNodeTable = "steelyard.dev/node-table"

// markExcluded follows the addresses of a node that external load balancers must not use.
const markExcluded = "excluded"

func shardOf(node string) int {
	h := fnv.New32a()
	h.Write([]byte(node))
	return int(h.Sum32() % nodeShards)
}

func shardName(i int) string { return fmt.Sprintf("steelyard-nodes-%x", i) }

func isShard(name string) bool {
	for i := range nodeShards {
		if name == shardName(i) {
			return true
		}
	}
	return false
}

// tableEntry returns the entry of a node: its InternalIPs and whether it is excluded, or "" if it has no address.
func (a *Allocator) tableEntry(n *core.Node) string {
	var fields []string
	for _, a := range nodeAddresses(n) {
		fields = append(fields, a.String())
	}
	if len(fields) > 0 && (&conditions{o: Options{IgnoreExclude: a.o.IgnoreExclude}}).excluded(n) != "" {
		fields = append(fields, markExcluded)
	}
	return strings.Join(fields, " ")
}

// nodeOf is the inverse of tableEntry: it returns a Node with the fields that others read.
func nodeOf(name, entry string) *core.Node {
	n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: intern(name)}}
	// The table does not say whether a node is ready; a probe of its proxy does.
	n.Status.Conditions = []core.NodeCondition{{Type: core.NodeReady, Status: core.ConditionTrue}}
	for _, field := range strings.Fields(entry) {
		if _, err := netip.ParseAddr(field); err == nil {
			n.Status.Addresses = append(n.Status.Addresses, core.NodeAddress{
				Type: core.NodeInternalIP, Address: field,
			})
		} else if field == markExcluded {
			n.Labels = map[string]string{labelExclude: ""}
		}
	}
	return n
}

// tableInformer returns an informer of the node table.
func tableInformer(client kubernetes.Interface, namespace string) cache.SharedIndexInformer {
	return newInformer(client, client.CoreV1().ConfigMaps(namespace), &core.ConfigMap{}, slim,
		func(l *meta.ListOptions) { l.LabelSelector = labelNodeTable })
}

// awaitTable waits until this client may read the node table, and returns false if ctx ends first. It calls refused
// once if the API server refuses access. It keeps retrying, because an API server that is starting refuses everything
// until it has read the roles.
func awaitTable(
	ctx context.Context, client kubernetes.Interface, namespace string, refused func(error),
) bool {
	said := false
	for delay := time.Second; ctx.Err() == nil; delay = min(2*delay, tableRetry) {
		err := readable(ctx, client, namespace)
		if err == nil {
			return true
		}
		if apierrors.IsForbidden(err) && !said {
			said = true
			refused(err)
		}
		sleep(ctx, delay)
	}
	return false
}

// readable returns nil if the API server lets this client read the node table.
func readable(ctx context.Context, client kubernetes.Interface, namespace string) error {
	_, err := client.CoreV1().ConfigMaps(namespace).List(ctx, meta.ListOptions{
		LabelSelector: labelNodeTable, Limit: 1, ResourceVersion: "0",
	})
	return err
}
