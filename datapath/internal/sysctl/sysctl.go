// Package sysctl changes kernel settings and restores them.
package sysctl

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

// Settings changes kernel settings. It stores the previous values in a file, so that Cleanup can restore them when the
// agent has stopped.
type Settings struct {
	file  string
	old   map[string]string // path → value before our first change
	log   *slog.Logger      // if nil, a failure to save is an error
	lacks error             // why the file lacks values in old, or nil
}

// Open reads the values that a previous agent stored.
func Open(stateDir string, log *slog.Logger) (*Settings, error) {
	s := &Settings{file: filepath.Join(stateDir, "sysctl.json"), old: map[string]string{}, log: log}
	text, err := os.ReadFile(s.file)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the saved sysctls: %w", err)
	}
	if err := json.Unmarshal(text, &s.old); err != nil {
		return nil, fmt.Errorf("read the saved sysctls: %s: %w", s.file, err)
	}
	return s, nil
}

// Forward makes the kernel forward packets that arrive on an interface. On lo this permits the programs' route lookups
// (bpf/route.h), and the kernel forwards and fragments packets that the programs hand to it (tc_as_from_lo). Most
// of these have one of this node's source addresses.
func (s *Settings) Forward(name string) error {
	if name == "lo" {
		if err := s.set("ipv4", name, "accept_local", "1"); err != nil {
			return err
		}
	}
	if err := s.set("ipv4", name, "forwarding", "1"); err != nil {
		return err
	}
	if _, err := os.Stat(Path("ipv6", name, "forwarding")); err != nil {
		return nil // IPv6 is disabled
	}
	// A forwarding interface ignores router advertisements unless accept_ra is 2 (ip-sysctl). lo receives none.
	v, err := os.ReadFile(Path("ipv6", name, "accept_ra"))
	if err == nil && strings.TrimSpace(string(v)) == "1" && name != "lo" {
		if err := s.set("ipv6", name, "accept_ra", "2"); err != nil {
			return err
		}
	}
	return s.set("ipv6", name, "forwarding", "1")
}

// StopForwarding restores the forwarding settings of all interfaces except lo. A previous version, or an agent that
// delivered to pods, enabled forwarding there.
func (s *Settings) StopForwarding() error {
	return s.RestoreIf(func(path string) bool {
		dir, key := filepath.Split(path)
		return filepath.Base(dir) != "lo" && (key == "forwarding" || key == "accept_ra")
	})
}

// Checkpoint returns a function that restores the settings changed since the call.
func (s *Settings) Checkpoint() (rollback func() error) {
	before := maps.Clone(s.old)
	return func() error {
		if len(before) == 0 {
			return s.Restore()
		}
		return s.RestoreIf(func(path string) bool { _, known := before[path]; return !known })
	}
}

// RestoreIf restores the settings whose path satisfies is.
func (s *Settings) RestoreIf(is func(path string) bool) error {
	var errs []error
	for path, value := range s.old {
		if !is(path) {
			continue
		}
		if err := Write(path, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
			continue
		}
		delete(s.old, path)
		errs = append(errs, s.save())
	}
	return errors.Join(errs...)
}

// Forwards returns a setting of Forward that an interface lacks, or "" if it has them all.
func (s *Settings) Forwards(name string) (missing string) {
	settings := []string{Path("ipv4", name, "forwarding"), Path("ipv6", name, "forwarding")}
	if name == "lo" {
		settings = append(settings, Path("ipv4", name, "accept_local"))
	}
	for _, path := range settings {
		if value, err := readFlag(path); err == nil && value != '1' {
			return path
		}
	}
	return ""
}

// readFlag returns the first character of a setting. It takes three system calls, and os.ReadFile nine.
func readFlag(path string) (value byte, err error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	var text [1]byte
	_, err = unix.Read(fd, text[:])
	return text[0], err
}

// Path returns the file of an interface setting.
func Path(family, iface, key string) string {
	return filepath.Join("/proc/sys/net", family, "conf", iface, key)
}

func (s *Settings) set(family, iface, key, value string) error {
	return s.change(Path(family, iface, key), func(string) string { return value })
}

// ReservedPorts lists the IPv4 and IPv6 ports that the kernel does not assign to sockets automatically.
const ReservedPorts = "/proc/sys/net/ipv4/ip_local_reserved_ports"

// ephemeralPorts is the range from which the kernel assigns ports to IPv4 and IPv6 sockets.
const ephemeralPorts = "/proc/sys/net/ipv4/ip_local_port_range"

// Reserve keeps the kernel from assigning ports in these ranges (first and last port) to this node's sockets. It
// reserves only ports in the kernel's own range.
func (s *Settings) Reserve(ranges [][2]uint16) error {
	text, err := os.ReadFile(ephemeralPorts)
	if err != nil {
		return fmt.Errorf("read sysctl: %w", err)
	}
	var first, last uint16
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil {
		return fmt.Errorf("read %s: %w", ephemeralPorts, err)
	}
	return s.change(ReservedPorts, func(others string) string {
		list := strings.FieldsFunc(others, func(r rune) bool { return r == ',' })
		for _, r := range ranges {
			if a, b := max(r[0], first), min(r[1], last); a <= b {
				list = append(list, fmt.Sprintf("%d-%d", a, b))
			}
		}
		return strings.Join(list, ",")
	})
}

// change sets a sysctl to a value computed from the value that it had before our first change.
func (s *Settings) change(path string, to func(was string) string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read sysctl: %w", err)
	}
	now := strings.TrimSpace(string(text))
	was, known := s.old[path]
	if !known {
		was = now
	}
	value := to(was)
	if value == now {
		return nil
	}
	if !known {
		s.old[path] = was
		// Save first, so that a crash in between does not lose the value. If saving fails, change the setting anyway,
		// because forwarding matters more than restoring.
		if err := s.save(); err != nil && s.log == nil {
			return err
		} else if err != nil {
			s.log.Warn("old value of a sysctl not saved; cleanup will not restore it",
				"sysctl", path, "was", was, "err", err)
		}
	}
	err = Write(path, value)
	if err != nil && !known { // nothing to restore
		delete(s.old, path)
		s.save() // an error is recorded in s.lacks
	}
	return err
}

func Write(path, value string) error {
	// A newline alone sets an empty value; writing no bytes does not.
	if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
		return fmt.Errorf("set sysctl: %w", err)
	}
	return nil
}

// Unsaved returns why cleanup cannot restore all settings, or nil if it can.
func (s *Settings) Unsaved() error { return s.lacks }

// SaveAgain retries a failed save, for example after the disk was full.
func (s *Settings) SaveAgain() {
	if s.lacks != nil && s.save() == nil {
		s.log.Info("sysctls saved again")
	}
}

func (s *Settings) save() error {
	s.lacks = s.write()
	return s.lacks
}

func (s *Settings) write() error {
	text, err := json.Marshal(s.old)
	if err != nil {
		return fmt.Errorf("save sysctls: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(s.file), 0o700); err != nil {
		return fmt.Errorf("save sysctls: %w", err)
	}
	if err := renameio.WriteFile(s.file, text, 0o600); err != nil {
		return fmt.Errorf("save sysctls: %w", err)
	}
	return nil
}

// Restore restores all settings. It ignores settings of deleted interfaces. It skips settings that already have the old
// value, because a container cannot write them.
func (s *Settings) Restore() error {
	var errs []error
	for path, value := range s.old {
		if now, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(now)) == value {
			continue
		}
		if err := Write(path, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 {
		if err := os.Remove(s.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		os.Remove(filepath.Dir(s.file)) // fails if other files remain
	}
	return errors.Join(errs...)
}
