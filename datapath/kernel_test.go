package datapath

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// An old kernel is refused by name, with what it lacks.
func TestOldKernelsAreRefused(t *testing.T) {
	for release, want := range map[string]string{
		"6.18.44": "", "6.1.0-56-amd64": "", "10.0-rc1": "", "unknown": "",
		"5.15.0-91-generic": "kernel 5.15.0-91-generic is too old: Steelyard needs Linux 6.1 or newer; " +
			"older kernels are not tested",
		"5.10.0-28-amd64": "kernel 5.10.0-28-amd64 is too old: Steelyard needs Linux 6.1 or newer; this one lacks " +
			"bpf_ktime_get_coarse_ns (Linux 5.11), bpf_check_mtu (Linux 5.12), " +
			"atomic instructions that return a value (Linux 5.12)",
	} {
		got := ""
		if err := checkKernel(release); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q; want %q", release, got, want)
		}
	}
	if err := CheckKernel(); err != nil {
		t.Errorf("the kernel of this test: %v", err)
	}
}

// The missing capabilities are named. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON.
func TestMissingCapabilitiesAreNamed(t *testing.T) {
	const (
		bpf, perfmon = 1 << unix.CAP_BPF, 1 << unix.CAP_PERFMON
		net, raw     = 1 << unix.CAP_NET_ADMIN, 1 << unix.CAP_NET_RAW
		admin        = 1 << unix.CAP_SYS_ADMIN
	)
	for effective, want := range map[uint64]string{
		bpf | perfmon | net | raw: "", bpf | perfmon | net: "", admin | net: "",
		bpf | net | raw:     "CAP_PERFMON",
		perfmon | net | raw: "CAP_BPF",
		admin | raw:         "CAP_NET_ADMIN",
		0:                   "CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_NET_RAW",
	} {
		got := ""
		if err := lackedBy(effective); err != nil {
			got, _, _ = strings.Cut(strings.TrimPrefix(err.Error(), "the agent lacks "), ";")
		}
		if got != want {
			t.Errorf("%#x: lacks %q; want %q", effective, got, want)
		}
	}
	if err := checkCapabilities(); err != nil {
		t.Errorf("in this test: %v", err)
	}
}
