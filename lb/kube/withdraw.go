package kube

import (
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"
)

// isOfOtherClass reports whether a Service gets addresses from another implementation or another class's allocator.
func isOfOtherClass(s *core.Service, classes []string) bool {
	return s.Spec.Type == core.ServiceTypeLoadBalancer && !matchesClass(s, classes...)
}

// takesBack reports whether the allocator of these classes must empty a Service's status and remove the finalizer. The
// Service is being deleted or has none of these classes. given lists the addresses that the allocator has assigned to
// it.
func takesBack(s *core.Service, classes []string, given []netip.Addr) (status, final bool) {
	had, empty := len(given) > 0, len(s.Status.LoadBalancer.Ingress) == 0
	if matchesClass(s, classes...) { // being deleted
		// A Service that was restored from a backup has the finalizer, which nobody else removes.
		final = had || empty || wroteStatus(s) || hasOurFinalizer(s)
		// The addresses are released together with the finalizer, because they must not be in two statuses, whoever
		// wrote this one.
		return wroteStatus(s) || final && hasFinalizer(s), final
	}
	other := isOfOtherClass(s, classes)
	ours := func(manager string) bool {
		if slices.ContainsFunc(classes, func(c string) bool { return c != "" && manager == managerOf(c) }) {
			return true
		}
		// Previously all classes shared this name; the default class still uses it.
		return manager == fieldManager && (!other || had && !slices.ContainsFunc(statusAddresses(s),
			func(addr netip.Addr) bool { return !slices.Contains(given, addr) }))
	}
	status = slices.ContainsFunc(managers(s, addressField), ours)
	// The new owner uses the same finalizer, so it stays if that owner has written addresses.
	final = had || slices.ContainsFunc(managers(s, finalizerField), ours)
	return status, status || final && (empty || !other)
}
