package state

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestPrivate(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(dir string) error
		want string // of the error; "": none, and mode 0700
	}{
		{"missing", os.Remove, ""},
		{"readable", func(dir string) error { return os.Chmod(dir, 0o755) }, ""},
		{"group may write", func(dir string) error { return os.Chmod(dir, 0o770) }, `(mode 0770); stop what uses it`},
		{"all may write", func(dir string) error { return os.Chmod(dir, 0o777) }, `"chmod 0700 `},
		{"a link", func(dir string) error {
			if err := os.Remove(dir); err != nil {
				return err
			}
			return os.Symlink(filepath.Dir(dir), dir)
		}, "is a symbolic link"},
		{"another owner", func(dir string) error { return os.Chown(dir, 65534, -1) }, "belongs to user 65534"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			must.Do(t, os.Mkdir(dir, 0o700))
			if err := tt.make(dir); err != nil {
				if os.IsPermission(err) {
					t.Skip("only root can give a directory away")
				}
				t.Fatal(err)
			}
			err := Private(dir)
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("error %v; want %q", err, tt.want)
				}
				return
			}
			if err != nil {
				t.Error(err)
			}
			if info, err := os.Stat(dir); err == nil && info.Mode().Perm() != 0o700 {
				t.Errorf("mode %04o", info.Mode().Perm())
			}
		})
	}
}
