package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
)

// A state folder that cannot be written does not keep the datapath from forwarding; the value to restore is logged.
func TestSysctlWithoutAStateFolder(t *testing.T) {
	dir := t.TempDir()
	file, setting := filepath.Join(dir, "file"), filepath.Join(dir, "forwarding")
	for _, path := range []string{file, setting} {
		if err := os.WriteFile(path, []byte("0\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := openSysctls(filepath.Join(dir, "missing"))
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	s.file, s.log = filepath.Join(file, "sysctl.json"), slog.New(slog.NewTextHandler(&log, nil))
	if err := s.change(setting, func(string) string { return "1" }); err != nil {
		t.Fatal(err)
	}
	if now, err := os.ReadFile(setting); err != nil || string(now) != "1\n" {
		t.Errorf("the setting is %q, %v; want 1", now, err)
	}
	if !strings.Contains(log.String(), "was=0") {
		t.Errorf("log %s", log.String())
	}
}

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
	fx.do(func() error { fx.d.uplinks.repairForwarding(); return nil })
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

// In a container settings cannot be written. Cleanup then has none to restore, and one that is as before is no error.
func TestSysctlThatCannotBeWritten(t *testing.T) {
	const path = "/proc/sys/kernel/ostype" // nobody may write it
	dir := t.TempDir()
	s, err := openSysctls(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.change(path, func(string) string { return "x" }); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("changed: %v", err)
	}
	for _, was := range []map[string]string{{}, {path: "Linux"}} { // recorded before, by an earlier version
		maps.Copy(s.old, was)
		if err := s.save(); err != nil {
			t.Fatal(err)
		}
		again, err := openSysctls(dir)
		if err != nil || len(again.old) != len(was) {
			t.Fatalf("%v, recorded %v; want %v", err, again.old, was)
		}
		if err := again.restore(); err != nil {
			t.Errorf("restore %v: %v", was, err)
		}
	}
	s.old[path] = "other"
	if err := s.restore(); err == nil {
		t.Error("another value was restored")
	}
}
