package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const (
	otherClass     = "example.com/Other"
	otherClassTOML = `
[kubernetes]
kubeconfig = %q
load_balancer_class = %q
[[pool]]
name = "other"
addresses = ["198.18.0.0/28", "2001:db8:51::/124"]
`
)

// leaders: each class elects its own leader, and a host service, which is in no pod, elects the same one as the pods.
func leaders(t *testing.T, c *cluster, pods ...*pod) {
	c.waitHolder(t, "steelyard", "allocator-")
	other := c.startAllocator(t, "other-class", fmt.Sprintf(otherClassTOML, kube.KubeconfigPath, otherClass))
	c.createService(t, "of-other-class", func(s *core.Service) {
		of := otherClass
		s.Spec.LoadBalancerClass = &of
	})
	vips := c.waitAddresses(t, "of-other-class") // while the other leader has its Lease
	if want := netip.MustParsePrefix("198.18.0.0/28"); !want.Contains(vips[0]) {
		t.Errorf("addresses %v; want one of %s", vips, want)
	}
	c.createService(t, "of-no-class", func(*core.Service) {})
	c.waitAddresses(t, "of-no-class")

	// The last node is a host service, and may assign addresses.
	host, node := c.Agents[2], c.Balancers[2]
	config := c.Config[2].TOML()
	c.addAccount(t, "host-service", "steelyard", "steelyard-allocator")
	c.restartAgent(t, 2, c.kubeconfigOf(t, "host-service"), strings.Replace(config, "allocate = false\n", "", 1))
	labtest.Until(t, 10*time.Second, "the host service knows the leader of the pods", func() error {
		out, err := host.CLI(t.Context(), "status")
		return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, "addresses are assigned by allocator-"),
			"%s", out))
	})
	for _, p := range c.allocators {
		must.Do(t, p.Stop())
	}
	c.waitHolder(t, "steelyard", node.Name())
	c.deleteService(t, "of-no-class") // by the host service
	c.deleteService(t, "of-other-class")

	leases := must.Get(c.api.CoordinationV1().Leases("").List(t.Context(), meta.ListOptions{}))(t)
	var names []string
	for _, l := range leases.Items {
		if strings.HasPrefix(l.Name, "steelyard") {
			names = append(names, l.Namespace+"/"+l.Name)
		}
	}
	want := []string{"steelyard/steelyard", "steelyard/steelyard-addresses",
		"steelyard/steelyard-example.com-other-a5f1e0", "steelyard/steelyard-example.com-other-a5f1e0-addresses"}
	if slices.Sort(names); !slices.Equal(names, want) {
		t.Errorf("Leases %q; want %q", names, want)
	}

	must.Do(t, other.Stop())
	c.restartAgent(t, 2, c.kubeconfigOf(t, "steelyard"), config)
	c.startAllocators(t)
	c.waitHolder(t, "steelyard", "allocator-")
	c.waitRecovered(t, pods...)
}

// waitHolder waits until who has a Lease has this prefix.
func (c *cluster) waitHolder(t *testing.T, name, prefix string) {
	t.Helper()
	labtest.Until(t, 30*time.Second, prefix+" has the Lease "+name, func() error {
		l, err := c.api.CoordinationV1().Leases("steelyard").Get(t.Context(), name, meta.GetOptions{})
		if err == nil && (l.Spec.HolderIdentity == nil || !strings.HasPrefix(*l.Spec.HolderIdentity, prefix)) {
			err = fmt.Errorf("%+v", l.Spec)
		}
		return err
	})
}

// restartAgent restarts the agent of a node with another kubeconfig and configuration.
func (c *cluster) restartAgent(t *testing.T, node int, kubeconfig, config string) {
	t.Helper()
	a := c.Agents[node]
	err := errors.Join(a.WriteFile(kube.KubeconfigPath, kubeconfig, 0o600), a.Terminate(t.Context(), 20*time.Second),
		a.Configure(config), a.Start(), a.WaitReady(t.Context(), lab.Ready))
	must.Do(t, err)
}

// addAccount makes a ServiceAccount with the rights of accounts of the manifest. A host service needs those of both.
func (c *cluster) addAccount(t *testing.T, name string, of ...string) {
	t.Helper()
	const ns = "steelyard"
	account := &core.ServiceAccount{ObjectMeta: meta.ObjectMeta{Name: name}}
	_, err := c.api.CoreV1().ServiceAccounts(ns).Create(t.Context(), account, meta.CreateOptions{})
	subjects := []rbac.Subject{{Kind: "ServiceAccount", Name: name, Namespace: ns}}
	api := c.api.RbacV1()
	for _, role := range of {
		of := rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: role}
		object := meta.ObjectMeta{Name: name + "-" + role}
		_, errCluster := api.ClusterRoleBindings().Create(t.Context(),
			&rbac.ClusterRoleBinding{ObjectMeta: object, RoleRef: of, Subjects: subjects}, meta.CreateOptions{})
		of.Kind = "Role"
		_, errRole := api.RoleBindings(ns).Create(t.Context(),
			&rbac.RoleBinding{ObjectMeta: object, RoleRef: of, Subjects: subjects}, meta.CreateOptions{})
		err = errors.Join(err, errCluster, errRole)
	}
	must.Do(t, err)
}
