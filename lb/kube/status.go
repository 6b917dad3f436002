package kube

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// fieldManager is the name under which the API server records what we have written (metadata.managedFields). The
// allocator of a class writes statuses under a name of its own. Before, all classes had this one.
const fieldManager = "steelyard"

// managerLength is the greatest length of a name that the API server accepts.
const managerLength = 128

// managerOf returns the field manager of the statuses and finalizers of a class.
func managerOf(class string) string {
	if class == "" {
		return fieldManager
	}
	name := fieldManager + ":" + class
	if len(name) > managerLength {
		sum := sha256.Sum256([]byte(class))
		end := fmt.Sprintf("-%x", sum[:6])
		name = name[:managerLength-len(end)] + end
	}
	return name
}

// isSteelyard reports whether a field manager is that of any class.
func isSteelyard(manager string) bool {
	return manager == fieldManager || strings.HasPrefix(manager, fieldManager+":")
}

// What an entry of managedFields contains for the addresses in the status, and for our finalizer. slim keeps these of
// an entry. The addresses are one field: an entry has all or none of them, and of those who wrote them the last one.
var (
	addressField   = []byte(`"f:ingress"`)
	finalizerField = []byte(finalizer)
)

// slimManaged keeps of managedFields who has written the addresses and who the finalizer.
func slimManaged(all []meta.ManagedFieldsEntry) (slim []meta.ManagedFieldsEntry) {
	for _, e := range all {
		var kept []byte
		for _, field := range [][]byte{addressField, finalizerField} {
			if e.FieldsV1 != nil && bytes.Contains(e.FieldsV1.Raw, field) {
				kept = append(kept, field...)
			}
		}
		if kept != nil {
			slim = append(slim, meta.ManagedFieldsEntry{
				Manager: intern(e.Manager), FieldsV1: &meta.FieldsV1{Raw: kept},
			})
		}
	}
	return slim
}

// managers returns who has written a field of a Service.
func managers(s *core.Service, field []byte) (names []string) {
	for _, e := range s.ManagedFields {
		if e.FieldsV1 != nil && bytes.Contains(e.FieldsV1.Raw, field) {
			names = append(names, e.Manager)
		}
	}
	return names
}

// wroteStatus reports whether the addresses in the status of a Service are from us, for whichever class.
func wroteStatus(s *core.Service) bool {
	return slices.ContainsFunc(managers(s, addressField), isSteelyard)
}

// isOurs reports whether the status of a Service has no addresses of others.
func isOurs(s *core.Service) bool { return len(s.Status.LoadBalancer.Ingress) == 0 || wroteStatus(s) }

// hasOurFinalizer reports whether a Service has the finalizer and we have added it, for whichever class: other
// implementations use the same one.
func hasOurFinalizer(s *core.Service) bool {
	return hasFinalizer(s) && slices.ContainsFunc(managers(s, finalizerField), isSteelyard)
}

func hasFinalizer(s *core.Service) bool { return slices.Contains(s.Finalizers, finalizer) }

// isReleased reports whether a Service is being deleted and its addresses may be those of another one, while the
// finalizer of somebody else keeps it.
func isReleased(s *core.Service) bool { return s.DeletionTimestamp != nil && !hasFinalizer(s) }

// statusOf returns the addresses in the status of a Service, as text; "" for one that has a host name only.
func statusOf(s *core.Service) (addrs []string) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		addrs = append(addrs, i.IP)
	}
	return addrs
}

// statusAddresses returns the addresses in the status of a Service, whatever their ipMode.
func statusAddresses(s *core.Service) (addrs []netip.Addr) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(i.IP); err == nil && !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// sameAddresses reports whether two lists have the same addresses in any order.
func sameAddresses(a, b []netip.Addr) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.SortFunc(a, netip.Addr.Compare)
	slices.SortFunc(b, netip.Addr.Compare)
	return slices.Equal(a, b)
}
