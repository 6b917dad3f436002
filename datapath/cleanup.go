package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
)

// Cleanup removes all state from the kernel: links with their programs, maps with all flows, filters, routes and sysctl
// changes. It needs no agent, and fails while one runs. Missing state is not an error.
func Cleanup(pinPath, stateDir string, log *slog.Logger) error {
	lock, err := pin.LockDir(pinPath)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		defer lock.Close()
	}
	errs := []error{hook.Remove(pinPath, log)}
	if err := os.RemoveAll(pinPath); err != nil && !errors.Is(err, unix.EBUSY) { // a container's mount stays, empty
		errs = append(errs, fmt.Errorf("remove the pinned maps: %w", err))
	}
	sys, err := sysctl.Open(stateDir, nil)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	return errors.Join(append(errs, sys.Restore())...)
}

// Remains reports whether an agent runs, or has left programs and maps, which continue to forward until Cleanup.
func Remains(pinPath string) (bool, error) {
	has, err := pin.HasPins(pinPath)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return has, err
}
