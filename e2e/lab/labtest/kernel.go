package labtest

import (
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TCHook returns the hook that the datapath uses for tc programs on this kernel: tcx since Linux 6.6, or clsact.
func TCHook(t testing.TB) string {
	t.Helper()
	var name unix.Utsname
	must.Do(t, unix.Uname(&name))
	var major, minor int
	must.Get(fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor))(t)
	if major > 6 || major == 6 && minor >= 6 {
		return "tcx"
	}
	return "clsact"
}

// TCHooks returns the hooks that the datapath can use on this kernel.
func TCHooks(t testing.TB) []string {
	t.Helper()
	return slices.Compact([]string{TCHook(t), "clsact"})
}
