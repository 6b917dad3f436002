package kube

import (
	"context"
	"fmt"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Cleanup removes what Steelyard has written to the Services of a cluster: its finalizers, which would prevent their
// deletion, and the addresses in their statuses. It keeps what others have written. It also removes the Leases, the
// node table and the keys in namespace. It fails while an agent in any namespace assigns addresses, because that agent
// would write them again. done is called for each changed object.
func Cleanup(ctx context.Context, client kubernetes.Interface, namespace string, done func(what string)) error {
	leases, err := client.CoordinationV1().Leases(meta.NamespaceAll).List(ctx, meta.ListOptions{})
	if err != nil {
		return fmt.Errorf("list the Leases: %w", err)
	}
	var ours []string
	for i := range leases.Items {
		l := &leases.Items[i]
		if l.Name != leaseName && !strings.HasPrefix(l.Name, leaseName+"-") {
			continue
		}
		if l.Spec.RenewTime != nil && !expired(l) {
			return fmt.Errorf("%s assigns addresses; stop it first: "+
				"kubectl delete --namespace %s daemonset,deployment steelyard",
				holderOf(l), l.Namespace)
		}
		if l.Namespace == namespace {
			ours = append(ours, l.Name)
		}
	}
	o := meta.ListOptions{Limit: 500}
	for {
		list, err := client.CoreV1().Services(meta.NamespaceAll).List(ctx, o)
		if err != nil {
			return fmt.Errorf("list the Services: %w", err)
		}
		for i := range list.Items {
			if err := cleanupService(ctx, client, &list.Items[i], done); err != nil {
				return fmt.Errorf("Service %s: %w", nameOf(&list.Items[i]), err)
			}
		}
		if o.Continue = list.Continue; o.Continue == "" {
			break
		}
	}
	for _, name := range ours {
		err := client.CoordinationV1().Leases(namespace).Delete(ctx, name, meta.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete Lease %s: %w", name, err)
		}
		done("Lease " + namespace + "/" + name)
	}
	for i := range nodeShards {
		err := client.CoreV1().ConfigMaps(namespace).Delete(ctx, shardName(i), meta.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete ConfigMap %s: %w", shardName(i), err)
		} else if err == nil {
			done("ConfigMap " + namespace + "/" + shardName(i))
		}
	}
	err = client.CoreV1().Secrets(namespace).Delete(ctx, KeySecret, meta.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete Secret %s: %w", KeySecret, err)
	} else if err == nil {
		done("Secret " + namespace + "/" + KeySecret)
	}
	return nil
}

// cleanupService removes what we wrote to one Service. It retries while others change the Service.
func cleanupService(ctx context.Context, client kubernetes.Interface, s *core.Service, done func(string)) error {
	a := NewAllocator(AllocatorOptions{Client: client})
	for {
		addrs := statusOf(s)
		if wroteStatus(s) {
			addrs = nil
		}
		// A Service that was restored from a backup has the finalizer, which nobody else removes.
		ours := hasOurFinalizer(s) || wroteStatus(s) || assignedCondition(s) != nil
		keep := hasFinalizer(s) && !ours
		now, err := a.write(ctx, s, keep, addrs, conditionsOfOthers(s))
		switch {
		case apierrors.IsNotFound(err) || err == nil && now == nil:
			return nil
		case err == nil:
			done("Service " + nameOf(s))
			return nil
		case !apierrors.IsConflict(err):
			return err
		}
		if !sleep(ctx, 100*time.Millisecond) {
			return ctx.Err()
		}
		s, err = client.CoreV1().Services(s.Namespace).Get(ctx, s.Name, meta.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
