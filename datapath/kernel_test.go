package datapath

import "testing"

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
