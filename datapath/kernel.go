package datapath

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// version is the version of a kernel.
type version struct{ major, minor int }

func (v version) before(other version) bool {
	return v.major < other.major || v.major == other.major && v.minor < other.minor
}

func (v version) String() string { return fmt.Sprintf("%d.%d", v.major, v.minor) }

// oldestKernel is the oldest kernel that the tests run on (make test-kernels).
var oldestKernel = version{6, 1}

// kernelFeatures lists features that the programs use and that some kernels before oldestKernel lack.
var kernelFeatures = []struct {
	name  string
	since version
}{
	{"CAP_BPF", version{5, 8}},
	{"XDP links", version{5, 9}},
	{"tail calls of programs with subprograms", version{5, 10}},
	{"bpf_redirect_neigh", version{5, 10}},
	{"bpf_ktime_get_coarse_ns", version{5, 11}},
	{"bpf_check_mtu", version{5, 12}},
	{"atomic instructions that return a value", version{5, 12}},
}

// CheckKernel fails on a kernel that is too old for the datapath, and names the features it lacks.
func CheckKernel() error {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("read the release of the kernel: %w", err)
	}
	return checkKernel(unix.ByteSliceToString(name.Release[:]))
}

// checkKernel is CheckKernel for a release. A release that is not a version is left to the verifier.
func checkKernel(release string) error {
	var v version
	if _, err := fmt.Sscanf(release, "%d.%d", &v.major, &v.minor); err != nil || !v.before(oldestKernel) {
		return nil
	}
	var lacks []string
	for _, f := range kernelFeatures {
		if v.before(f.since) {
			lacks = append(lacks, fmt.Sprintf("%s (Linux %s)", f.name, f.since))
		}
	}
	why := "older kernels are not tested"
	if lacks != nil {
		why = "this one lacks " + strings.Join(lacks, ", ")
	}
	return fmt.Errorf("kernel %s is too old: Steelyard needs Linux %s or newer; %s", release, oldestKernel, why)
}

// capabilities lists the systemd unit's capabilities that the datapath uses.
var capabilities = []struct {
	name     string
	bit      int
	admin    bool // CAP_SYS_ADMIN includes it
	optional bool // the agent runs without it, and its status shows a problem
}{
	{"CAP_BPF", unix.CAP_BPF, true, false},
	{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN, false, false},
	{"CAP_PERFMON", unix.CAP_PERFMON, true, false},
	{"CAP_NET_RAW", unix.CAP_NET_RAW, false, true},
}

// checkCapabilities names the capabilities that this process lacks. The kernel's errors do not: without CAP_BPF it
// reports a limit on locked memory, without CAP_PERFMON a program that the verifier rejects.
func checkCapabilities() error {
	var have [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &have[0]); err != nil {
		return fmt.Errorf("read the capabilities: %w", err)
	}
	return lackedBy(uint64(have[1].Effective)<<32 | uint64(have[0].Effective))
}

// lackedBy is checkCapabilities for a set of effective capabilities.
func lackedBy(effective uint64) error {
	has := func(bit int) bool { return effective>>bit&1 == 1 }
	var lacks []string
	needed := false
	for _, c := range capabilities {
		if !has(c.bit) && !(c.admin && has(unix.CAP_SYS_ADMIN)) {
			lacks = append(lacks, c.name)
			needed = needed || !c.optional
		}
	}
	if !needed {
		return nil
	}
	return errors.New("the agent lacks " + strings.Join(lacks, ", ") + "; start it as root, with the capabilities of " +
		"the systemd unit or of the manifest")
}
