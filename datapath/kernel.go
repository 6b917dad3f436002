package datapath

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

// The oldest kernel tested (make test-kernels).
const testedMajor, testedMinor = 6, 1

// kernelFeatures lists features that the programs use and some older kernels lack. Distributions backport them without
// changing the kernel version.
var kernelFeatures = []struct {
	name    string
	program ebpf.ProgramType
	helper  asm.BuiltinFunc
}{
	{"bpf_jiffies64", ebpf.XDP, asm.FnJiffies64},
	{"bpf_redirect_neigh", ebpf.SchedCLS, asm.FnRedirectNeigh},
	{"bpf_ktime_get_coarse_ns", ebpf.XDP, asm.FnKtimeGetCoarseNs},
	{"bpf_check_mtu", ebpf.SchedCLS, asm.FnCheckMtu},
}

// lackedFeatures returns the names of the features that this kernel lacks.
func lackedFeatures() (lacks []string) {
	for _, f := range kernelFeatures {
		if errors.Is(features.HaveProgramHelper(f.program, f.helper), ebpf.ErrNotSupported) {
			lacks = append(lacks, f.name)
		}
	}
	return lacks
}

// checkKernel rejects a kernel older than the oldest tested one if it lacks features or allowUntested is false. It
// accepts a release that it cannot parse, and leaves the decision to the verifier.
func checkKernel(release string, allowUntested bool, lacked func() []string) error {
	var major, minor int
	_, err := fmt.Sscanf(release, "%d.%d", &major, &minor)
	if err != nil || major > testedMajor || major == testedMajor && minor >= testedMinor {
		return nil
	}
	why := `to try this one, write "allow_untested_kernel = true" in [datapath]`
	if lacks := lacked(); lacks != nil {
		why = "this one lacks " + strings.Join(lacks, ", ")
	} else if allowUntested {
		return nil
	}
	return fmt.Errorf("kernel %s is too old: Steelyard is tested on Linux %d.%d and newer; %s", release, testedMajor,
		testedMinor, why)
}

func kernelRelease() (string, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "", fmt.Errorf("read the kernel release: %w", err)
	}
	return unix.ByteSliceToString(name.Release[:]), nil
}

// capabilities lists the capabilities that the datapath uses. The systemd unit has all of them.
var capabilities = []struct {
	name     string
	bit      int
	admin    bool // CAP_SYS_ADMIN includes it
	optional bool // the agent runs without it, and its status reports a problem
}{
	{"CAP_BPF", unix.CAP_BPF, true, false},
	{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN, false, false},
	{"CAP_PERFMON", unix.CAP_PERFMON, true, false},
	{"CAP_NET_RAW", unix.CAP_NET_RAW, false, true},
}

// checkCapabilities returns an error that names the missing capabilities. The kernel's own errors are misleading:
// without CAP_BPF it reports a limit on locked memory, and without CAP_PERFMON the verifier rejects a program.
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
