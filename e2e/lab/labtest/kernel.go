package labtest

import (
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TCHook returns the hook that the datapath selects for tc programs on this kernel: tcx since Linux 6.6, otherwise
// clsact.
func TCHook(t testing.TB) string {
	t.Helper()
	var name unix.Utsname
	must(t, unix.Uname(&name))
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	must(t, err)
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
