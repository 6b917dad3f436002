package sysctl

import (
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// If the state directory cannot be written, the datapath still forwards, and the value to restore is logged.
func TestSysctlWithoutAStateFolder(t *testing.T) {
	dir := t.TempDir()
	file, setting := filepath.Join(dir, "file"), filepath.Join(dir, "forwarding")
	for _, path := range []string{file, setting} {
		must.Do(t, os.WriteFile(path, []byte("0\n"), 0o600))
	}
	s := must.Get(Open(filepath.Join(dir, "missing"), nil))(t)
	var log strings.Builder
	s.file, s.log = filepath.Join(file, "sysctl.json"), slog.New(slog.NewTextHandler(&log, nil))
	must.Do(t, s.change(setting, func(string) string { return "1" }))
	now, err := os.ReadFile(setting)
	must.True(t, err == nil && string(now) == "1\n", "the setting is %q, %v; want 1", now, err)
	must.True(t, strings.Contains(log.String(), "was=0"), "log %s", log.String())
}

// In a container, settings cannot be written. Then Cleanup has nothing to restore, and an unchanged setting is not an
// error.
func TestSysctlThatCannotBeWritten(t *testing.T) {
	const path = "/proc/sys/kernel/ostype" // not writable by anybody
	dir := t.TempDir()
	s := must.Get(Open(dir, nil))(t)
	if err := s.change(path, func(string) string { return "x" }); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("changed: %v", err)
	}
	for _, was := range []map[string]string{{}, {path: "Linux"}} { // recorded by a previous version
		maps.Copy(s.old, was)
		must.Do(t, s.save())
		again, err := Open(dir, nil)
		must.Need(t, err == nil && len(again.old) == len(was), "%v, recorded %v; want %v", err, again.old, was)
		if err := again.Restore(); err != nil {
			t.Errorf("restore %v: %v", was, err)
		}
	}
	s.old[path] = "other"
	must.True(t, s.Restore() != nil, "another value was restored")
}
