package datapath

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

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
