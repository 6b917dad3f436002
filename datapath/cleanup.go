package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
)

// Cleanup removes all state from the kernel: links and their programs, maps and their flows, filters, routes and sysctl
// changes. It needs no agent, and fails while one is running. Missing state is not an error. It first calls before.
func Cleanup(pinPath, stateDir string, log *slog.Logger, before ...func() error) error {
	lock, err := pin.LockDir(pinPath)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		defer lock.Close()
	}
	var errs []error
	for _, f := range before {
		errs = append(errs, f())
	}
	errs = append(errs, hook.Remove(pinPath, log))
	// In a container the directory is a mount point, which stays but is now empty.
	if err := os.RemoveAll(pinPath); err != nil && !errors.Is(err, unix.EBUSY) {
		errs = append(errs, fmt.Errorf("remove the pinned maps: %w", err))
	}
	sys, err := sysctl.Open(stateDir, nil)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	return errors.Join(append(errs, sys.Restore())...)
}

// Remains reports whether an agent is running, or has left programs and maps that keep forwarding until Cleanup.
func Remains(pinPath string) (bool, error) { return pin.HasPins(pinPath) }

// Remainder is what a stopped agent left in the kernel.
type Remainder struct {
	VIPs []netip.Addr  // whose packets are still forwarded
	Away time.Duration // since the agent's last heartbeat; it writes one every few seconds
}

// ReadRemainder reads the tables of a stopped agent. It returns nil if there are none.
func ReadRemainder(pinPath string) (*Remainder, error) {
	if has, err := Remains(pinPath); err != nil || !has {
		return nil, err
	}
	var collector bpf.Collector
	err := readPinned(pinPath, bpf.SyMapSyCollector, func(m *ebpf.Map) error { return m.Lookup(uint32(0), &collector) })
	if err != nil {
		return nil, err
	}
	r := &Remainder{Away: bpf.Idle(bpf.Uptime(), collector.Seen)}
	err = readPinned(pinPath, bpf.SyMapSyFrontends, func(m *ebpf.Map) error {
		var key bpf.FrontendKey
		var value bpf.Frontend
		all := m.Iterate()
		for all.Next(&key, &value) {
			if key.Decap == 0 {
				r.VIPs = append(r.VIPs, bpf.FromAddr(key.Vip))
			}
		}
		return all.Err()
	})
	slices.SortFunc(r.VIPs, netip.Addr.Compare)
	r.VIPs = slices.Compact(r.VIPs)
	return r, err
}

// readPinned calls read with a pinned map, opened read-only.
func readPinned(pinPath, name string, read func(*ebpf.Map) error) error {
	path := filepath.Join(pinPath, Schema, name)
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	defer m.Close()
	if err := read(m); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
