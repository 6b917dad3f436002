package kube

import (
	"bytes"
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// fieldManager is the name under which the API server records what we have written (metadata.managedFields).
const fieldManager = "steelyard"

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

// wroteStatus reports whether the addresses in the status of a Service are from us.
func wroteStatus(s *core.Service) bool {
	return slices.Contains(managers(s, addressField), fieldManager)
}

// hasOurFinalizer reports whether a Service has the finalizer and we have added it: implementations of other classes
// use the same one.
func hasOurFinalizer(s *core.Service) bool {
	return slices.Contains(s.Finalizers, finalizer) && slices.Contains(managers(s, finalizerField), fieldManager)
}

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
