package datapath

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb/lbtest"
)

// The directory of the pins is one that nobody else can change, and may be all that a container sees of the bpffs. A
// bpffs that others may write to is a warning.
func TestOwnerOfThePins(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	warnings := func() (list string) {
		fx.do(func() error { list = strings.Join(lbtest.Texts(fx.d.Findings()), "; "); return nil })
		return list
	}
	if w := warnings(); strings.Contains(w, "bpffs") {
		t.Errorf("warnings %q", w)
	}
	fx.close()
	root := filepath.Dir(fx.o.PinPath)
	for _, tt := range []struct {
		change, undo func() error
		want         string
	}{
		{
			func() error { return os.Chown(fx.o.PinPath, 65534, -1) },
			func() error { return os.Chown(fx.o.PinPath, 0, -1) },
			"belongs to user 65534",
		},
		{
			func() error { return os.Chmod(fx.o.PinPath, 0o777) },
			func() error { return os.Chmod(fx.o.PinPath, 0o755) },
			"can be written by other users (mode 0777)",
		},
	} {
		fx.do(tt.change)
		fx.do(func() error {
			d, err := Open(fx.o)
			if err == nil {
				d.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v; want %s", err, tt.want)
			}
			return nil
		})
		fx.do(tt.undo)
	}
	fx.do(func() error {
		if err := unix.Mount(fx.o.PinPath, fx.o.PinPath, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		return os.Chmod(root, 0o1777|os.ModeSticky)
	})
	fx.open()
	if w := warnings(); !strings.Contains(w, "may write to the bpffs /sys/fs/bpf (dtrwxrwxrwx)") {
		t.Errorf("warnings %q", w)
	}
	fx.close()
	fx.do(func() error {
		if err := Cleanup(fx.o.PinPath, fx.o.StateDir, quiet); err != nil {
			return err
		}
		left, err := os.ReadDir(fx.o.PinPath)
		if len(left) > 0 {
			t.Errorf("after the cleanup: %v", left)
		}
		return err
	})
}
