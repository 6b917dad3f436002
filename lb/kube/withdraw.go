package kube

import (
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"
)

// isOfOtherClass reports whether a Service gets addresses from another implementation, or the allocator of another
// class.
func isOfOtherClass(s *core.Service, class string) bool {
	return s.Spec.Type == core.ServiceTypeLoadBalancer && !matchesClass(s, class)
}

// takesBack reports whether the allocator of a class is to empty the status of a Service, and to remove the finalizer.
// The Service is being deleted or is not of the class. Given is what the allocator has assigned to it.
func takesBack(s *core.Service, class string, given []netip.Addr) (status, final bool) {
	had, empty := len(given) > 0, len(s.Status.LoadBalancer.Ingress) == 0
	if matchesClass(s, class) { // being deleted
		// A Service that was created with the finalizer, from a backup, has it from nobody who removes it.
		final = had || empty || wroteStatus(s) || hasOurFinalizer(s)
		// The addresses are released with the finalizer: they must not be in two statuses, whoever wrote this one.
		return wroteStatus(s) || final && hasFinalizer(s), final
	}
	other := isOfOtherClass(s, class)
	ours := func(manager string) bool {
		if class != "" && manager == managerOf(class) {
			return true
		}
		// Under this name the allocators of all classes wrote before, and that of the default class does.
		return manager == fieldManager && (!other || had && !slices.ContainsFunc(statusAddresses(s),
			func(addr netip.Addr) bool { return !slices.Contains(given, addr) }))
	}
	status = slices.ContainsFunc(managers(s, addressField), ours)
	// The new owner uses the same finalizer, so it stays when that one has written addresses.
	final = had || slices.ContainsFunc(managers(s, finalizerField), ours)
	return status, status || final && (empty || !other)
}
