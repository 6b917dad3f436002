package datapath

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
)

// On a full disk, a problem says that Cleanup cannot restore the settings. They are stored when there is space again.
func TestSysctlsOnAFullDisk(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	disk := t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "nr_inodes=1"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(disk, unix.MNT_DETACH) })
	const forwarding = "/proc/sys/net/ipv4/conf/lo/forwarding"
	var was []byte
	fx, _ := verified(t, ModeTC, false, func(o *Options) { o.StateDir = disk }, func(fx *fixture) {
		fx.do(func() (err error) { was, err = os.ReadFile(forwarding); return err })
	})
	const problem = `values of sysctls for "steelyard cleanup" not stored: `
	list := lbtest.Texts(fx.d.Findings())
	if len(list) != 1 || !strings.HasPrefix(list[0], problem) || !strings.Contains(list[0], unix.ENOSPC.Error()) {
		t.Errorf("problems %q", list)
	}
	if err := unix.Mount("tmpfs", disk, "tmpfs", unix.MS_REMOUNT, "nr_inodes=100"); err != nil {
		t.Fatal(err)
	}
	fx.do(func() error { fx.d.hooks.RepairForwarding(); return nil })
	if list := lbtest.Texts(fx.d.Findings()); len(list) > 0 {
		t.Errorf("problems with space on the disk: %q", list)
	}
	fx.close()
	fx.do(func() error {
		now, err := os.ReadFile(forwarding)
		if string(now) != "1\n" || string(now) == string(was) {
			t.Errorf("forwarding on lo is %q, and was %q: the test covers nothing", now, was)
		}
		err = errors.Join(err, Cleanup(fx.o.PinPath, fx.o.StateDir, quiet))
		if now, e := os.ReadFile(forwarding); string(now) != string(was) || e != nil {
			err = errors.Join(err, e, fmt.Errorf("forwarding on lo is %q after Cleanup, and was %q", now, was))
		}
		return err
	})
}
