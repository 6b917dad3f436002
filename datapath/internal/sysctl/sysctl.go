// Package sysctl changes settings of the kernel, and restores them.
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
)

// Settings changes kernel settings and keeps the earlier values in a file, so that Cleanup can restore them after the
// agent has ended.
type Settings struct {
	file  string
	old   map[string]string // path → value before our first change
	log   *slog.Logger      // nil: what cannot be saved is an error
	lacks error             // why the file lacks changes of old; nil: it has all
}

// Open reads what an earlier agent has changed.
func Open(stateDir string, log *slog.Logger) (*Settings, error) {
	s := &Settings{file: filepath.Join(stateDir, "sysctl.json"), old: map[string]string{}, log: log}
	text, err := os.ReadFile(s.file)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the sysctls changed before: %w", err)
	}
	if err := json.Unmarshal(text, &s.old); err != nil {
		return nil, fmt.Errorf("read the sysctls changed before: %s: %w", s.file, err)
	}
	return s, nil
}

// Forward makes the kernel forward packets that arrive on an interface. On lo it permits lookups of routes by the
// programs (bpf/route.h), and the packets are those that the programs hand to the kernel to be fragmented
// (tc_fragment); most have a source of this node.
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
	// An interface that forwards ignores router advertisements unless accept_ra is 2 (ip-sysctl). lo receives none.
	v, err := os.ReadFile(Path("ipv6", name, "accept_ra"))
	if err == nil && strings.TrimSpace(string(v)) == "1" && name != "lo" {
		if err := s.set("ipv6", name, "accept_ra", "2"); err != nil {
			return err
		}
	}
	return s.set("ipv6", name, "forwarding", "1")
}

// StopForwarding restores the settings of all interfaces but lo. An earlier version, or one that delivered to pods,
// forwarded packets that arrive there.
func (s *Settings) StopForwarding() error {
	return s.RestoreIf(func(path string) bool {
		dir, key := filepath.Split(path)
		return filepath.Base(dir) != "lo" && (key == "forwarding" || key == "accept_ra")
	})
}

// Checkpoint returns what restores the settings that are changed from now on.
func (s *Settings) Checkpoint() (rollback func() error) {
	before := maps.Clone(s.old)
	return func() error {
		if len(before) == 0 {
			return s.Restore()
		}
		return s.RestoreIf(func(path string) bool { _, known := before[path]; return !known })
	}
}

// RestoreIf restores the settings of these paths.
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

// Forwards returns which setting of forward an interface lacks; "": none.
func (s *Settings) Forwards(name string) (missing string) {
	settings := []string{Path("ipv4", name, "forwarding"), Path("ipv6", name, "forwarding")}
	if name == "lo" {
		settings = append(settings, Path("ipv4", name, "accept_local"))
	}
	for _, path := range settings {
		if text, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(text)) != "1" {
			return path
		}
	}
	return ""
}

// Path returns the file of a setting of an interface.
func Path(family, iface, key string) string {
	return filepath.Join("/proc/sys/net", family, "conf", iface, key)
}

func (s *Settings) set(family, iface, key, value string) error {
	return s.change(Path(family, iface, key), func(string) string { return value })
}

// ReservedPorts are the ports of which the kernel assigns none to a socket by itself, for IPv4 and IPv6.
const ReservedPorts = "/proc/sys/net/ipv4/ip_local_reserved_ports"

// ephemeralPorts is the range from which the kernel assigns ports to sockets, for IPv4 and IPv6.
const ephemeralPorts = "/proc/sys/net/ipv4/ip_local_port_range"

// Reserve makes the kernel assign none of these ports to sockets of this node: each range has a first and a last one.
// Only those are listed that it could assign.
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

// change sets a sysctl to a value computed from the one before our first change.
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
		// Before the change, so that a crash between the two loses no value. Forwarding goes before restoring.
		if err := s.save(); err != nil && s.log == nil {
			return err
		} else if err != nil {
			s.log.Warn("sysctl not restored by cleanup", "sysctl", path, "was", was, "err", err)
		}
	}
	err = Write(path, value)
	if err != nil && !known { // nothing to restore
		delete(s.old, path)
		s.save() // s.lacks has its error
	}
	return err
}

// Write sets the setting of a file.
func Write(path, value string) error {
	// With a newline: a write of no bytes does not set an empty value.
	if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
		return fmt.Errorf("set sysctl: %w", err)
	}
	return nil
}

// Unsaved returns why cleanup cannot restore all settings; nil: it can.
func (s *Settings) Unsaved() error { return s.lacks }

// SaveAgain saves what could not be saved, for example to a full disk.
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

// Restore restores all settings; those of deleted interfaces no longer exist. In a container, where they cannot be
// written, those that are as before are none to restore.
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
		os.Remove(filepath.Dir(s.file)) // fails if it has other files
	}
	return errors.Join(errs...)
}
