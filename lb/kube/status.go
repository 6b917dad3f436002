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

// fieldManager is the name under which the API server records our writes (metadata.managedFields). The allocator of a
// class writes statuses under its own name. Previously all classes shared this one.
const fieldManager = "steelyard"

// managerLength is the maximum length of a field manager's name in the API server.
const managerLength = 128

// managerOf returns the field manager for the statuses and finalizers of a class.
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

// isSteelyard reports whether a field manager belongs to any class.
func isSteelyard(manager string) bool {
	return manager == fieldManager || strings.HasPrefix(manager, fieldManager+":")
}

// The texts in a managedFields entry for the addresses in the status, and for our finalizer. slim keeps only these. The
// addresses are one field, which belongs to its last writer.
var (
	addressField   = []byte(`"f:ingress"`)
	finalizerField = []byte(finalizer)
)

// slimManaged keeps only who wrote the addresses and the finalizer.
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

// managers returns the field managers that have written a field of a Service.
func managers(s *core.Service, field []byte) (names []string) {
	for _, e := range s.ManagedFields {
		if e.FieldsV1 != nil && bytes.Contains(e.FieldsV1.Raw, field) {
			names = append(names, e.Manager)
		}
	}
	return names
}

// wroteStatus reports whether we wrote the addresses in a Service's status, for any class.
func wroteStatus(s *core.Service) bool {
	return slices.ContainsFunc(managers(s, addressField), isSteelyard)
}

// isOurs reports whether a Service's status has no addresses from other controllers.
func isOurs(s *core.Service) bool { return len(s.Status.LoadBalancer.Ingress) == 0 || wroteStatus(s) }

// hasOurFinalizer reports whether a Service has the finalizer and we added it, for any class. Other implementations use
// the same finalizer.
func hasOurFinalizer(s *core.Service) bool {
	return hasFinalizer(s) && slices.ContainsFunc(managers(s, finalizerField), isSteelyard)
}

func hasFinalizer(s *core.Service) bool { return slices.Contains(s.Finalizers, finalizer) }

// isReleased reports whether a Service is being deleted and its addresses may already belong to another one, while
// somebody else's finalizer keeps it.
func isReleased(s *core.Service) bool { return s.DeletionTimestamp != nil && !hasFinalizer(s) }

// statusOf returns the addresses in a Service's status as text, with "" for an entry that has only a host name.
func statusOf(s *core.Service) (addrs []string) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		addrs = append(addrs, i.IP)
	}
	return addrs
}

// statusAddresses returns the addresses in a Service's status, whatever their ipMode.
func statusAddresses(s *core.Service) (addrs []netip.Addr) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(i.IP); err == nil && !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// sameAddresses reports whether two lists contain the same addresses in any order.
func sameAddresses(a, b []netip.Addr) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.SortFunc(a, netip.Addr.Compare)
	slices.SortFunc(b, netip.Addr.Compare)
	return slices.Equal(a, b)
}
