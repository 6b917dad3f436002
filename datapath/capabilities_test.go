package datapath

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What the agent lacks is named. CAP_SYS_ADMIN is more than CAP_BPF and CAP_PERFMON.
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
