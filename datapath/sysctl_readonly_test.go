package datapath

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
