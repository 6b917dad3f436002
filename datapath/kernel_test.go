package datapath

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A kernel that lacks features is refused by version, with their names. An untested kernel is refused unless the
// options allow it.
func TestOldKernelsAreRefused(t *testing.T) {
	const tested = " is too old: Steelyard is tested on Linux 6.1 and newer; "
	lacks := []string{"bpf_check_mtu", "bpf_redirect_neigh"}
	for _, tt := range []struct {
		release string
		allow   bool
		lacks   []string
		want    string
	}{
		{"6.18.44", false, lacks, ""}, {"6.1.0-56-amd64", false, lacks, ""}, {"10.0-rc1", false, lacks, ""},
		{"unknown", false, lacks, ""}, {"5.14.0-427.el9.x86_64", true, nil, ""},
		{"5.14.0-427.el9.x86_64", false, nil, "kernel 5.14.0-427.el9.x86_64" + tested +
			`to try this one, write "allow_untested_kernel = true" in [datapath]`},
		{"5.10.0-28", true, lacks, "kernel 5.10.0-28" + tested + "this one lacks bpf_check_mtu, bpf_redirect_neigh"},
	} {
		got := ""
		if err := checkKernel(tt.release, tt.allow, func() []string { return tt.lacks }); err != nil {
			got = err.Error()
		}
		must.Row(t, tt.release, tt.want, got)
	}
	labtest.Root(t)
	if lacks := lackedFeatures(); lacks != nil {
		t.Errorf("the kernel of this test lacks %v", lacks)
	}
}

// Missing capabilities are named. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON.
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
		must.True(t, got == want, "%#x: lacks %q; want %q", effective, got, want)
	}
	if err := checkCapabilities(); err != nil {
		t.Errorf("in this test: %v", err)
	}
}
