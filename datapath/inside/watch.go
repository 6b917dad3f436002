package inside

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
)

// Watch is a second process that attaches the programs of the running or last agent to new interfaces, so that pods
// that are made while the agent is away are served. It runs the agent's code for devices with the programs that the
// agent has pinned in watchDir. Whether an interface is a configured uplink, it reads from the table of devices. While
// both run, each finds that the other has attached.

// watchEvery is how often Watch looks for the pinned programs.
const watchEvery = time.Second

// lockTimeout is how long a change of the interfaces waits for the other process, which may have been stopped.
const lockTimeout = time.Second

// watchDir has the programs for Watch. It is gone while interfaces must not be served: before the first agent, while
// one drains, and after Cleanup. A running Watch has a lock on it.
func watchDir(pins string) string { return filepath.Join(pins, "watch") }

// watchPins returns the pins of the programs at ingress and at egress.
func watchPins(pins string) [2]string {
	return [2]string{filepath.Join(watchDir(pins), "in"), filepath.Join(watchDir(pins), "out")}
}

// publish replaces the programs for Watch. Each pin always holds a program, even after a crash.
func publish(in, out *ebpf.Program, pins string) error {
	unlock := lock(pins)
	defer unlock()
	if err := os.MkdirAll(watchDir(pins), 0o700); err != nil {
		return err
	}
	pin := watchPins(pins)
	for i, p := range []*ebpf.Program{in, out} {
		made := pin[i] + "-new"
		if err := os.Remove(made); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		c, err := p.Clone() // p would remember its pin, and pin nothing when it is published again
		if err != nil {
			return err
		}
		if err := errors.Join(c.Pin(made), c.Close()); err != nil {
			return err
		}
		if err := os.Rename(made, pin[i]); err != nil {
			return err
		}
	}
	return nil
}

// withdraw removes the programs for Watch, which attaches nothing from then on.
func withdraw(pins string) error {
	unlock := lock(pins)
	defer unlock()
	return os.RemoveAll(watchDir(pins))
}

// lock excludes other processes from changes of the interfaces until unlock. Without it, two that attach to one
// interface at tcx could remove each other's pins.
func lock(pins string) (unlock func()) {
	dir, err := os.Open(pins)
	if err != nil { // nothing is pinned
		return func() {}
	}
	for end := time.Now().Add(lockTimeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if !errors.Is(unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK) {
			break
		}
	}
	return func() { dir.Close() }
}

// Watched reports whether a Watch runs with these pins.
func Watched(pins string) (bool, error) {
	dir, err := os.Open(watchDir(pins))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer dir.Close()
	l := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(dir.Fd(), unix.F_OFD_GETLK, &l); err != nil {
		return false, fmt.Errorf("read the lock of the watcher: %w", err)
	}
	return l.Type != unix.F_UNLCK, nil
}

// Watch attaches the pinned programs to the interfaces of the calling thread's network namespace until ctx ends. While
// there are none, it waits.
func Watch(ctx context.Context, pins string, log *slog.Logger) {
	said := ""
	for ctx.Err() == nil {
		err := watch(ctx, pins, log)
		if errors.Is(err, errReplaced) {
			said = ""
			continue
		}
		if text := fmt.Sprint(err); err != nil && text != said { // not each second
			log.Warn("waiting for the service proxy", "err", err)
			said = text
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchEvery):
		}
	}
}

// errReplaced ends a watch whose programs are no longer those that are pinned.
var errReplaced = errors.New("the agent has replaced its programs")

func watch(ctx context.Context, pins string, log *slog.Logger) error {
	w, err := openWatcher(pins)
	defer w.close()
	if err != nil {
		return err
	}
	log.Info("attaching the programs of the service proxy to new interfaces")
	watched, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() { // the kernel keeps the tables of removed programs as long as w
		for watched.Err() == nil {
			if err := w.check(); err != nil {
				stop(err)
			}
			time.Sleep(watchEvery)
		}
	}()
	err = newDevices(deviceOptions{
		in: w.programs[0], out: w.programs[1], devices: w.devices, uplinks: func() []string { return w.uplinks },
		pins: pins, log: log, begin: w.begin,
	}).Run(watched)
	if ctx.Err() != nil {
		return nil
	}
	return cmp.Or(context.Cause(watched), err)
}

// watcher is what Watch needs of the agent.
type watcher struct {
	pins     string
	dir      *os.File // locked
	files    [2]fs.FileInfo
	programs [2]*ebpf.Program
	devices  *ebpf.Map
	uplinks  []string // at the last begin
}

func openWatcher(pins string) (*watcher, error) {
	w := &watcher{pins: pins}
	var err error
	if w.dir, err = os.Open(watchDir(pins)); err != nil {
		return w, err
	}
	if err := unix.FcntlFlock(w.dir.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK}); err != nil {
		return w, fmt.Errorf("lock %s: %w", watchDir(pins), err)
	}
	for i, pin := range watchPins(pins) {
		if w.files[i], err = os.Stat(pin); err != nil { // before the program, which may be replaced
			return w, err
		}
		if w.programs[i], err = ebpf.LoadPinnedProgram(pin, nil); err != nil {
			return w, fmt.Errorf("open %s: %w", pin, err)
		}
	}
	w.devices, err = ebpf.LoadPinnedMap(filepath.Join(pins, "sy_in_devices"), nil)
	if err != nil {
		return w, fmt.Errorf("open the table of devices: %w", err)
	}
	if size := uint32(unsafe.Sizeof(prog.Device{})); w.devices.ValueSize() != size {
		return w, errors.New("the agent is of another version; restart this process when it is of the same")
	}
	return w, nil
}

func (w *watcher) close() {
	for _, p := range w.programs {
		p.Close()
	}
	w.devices.Close()
	w.dir.Close()
}

// check returns errReplaced unless the pins are those that were opened.
func (w *watcher) check() error {
	for i, pin := range watchPins(w.pins) {
		if now, err := os.Stat(pin); err != nil || !os.SameFile(now, w.files[i]) {
			return errReplaced
		}
	}
	return nil
}

// begin locks the interfaces, and reads which of them the agent calls uplinks.
func (w *watcher) begin() (unlock func(), err error) {
	unlock = lock(w.pins)
	if err := w.check(); err != nil {
		unlock()
		return nil, err
	}
	w.uplinks = nil
	var index uint32
	var e prog.Device
	all := w.devices.Iterate()
	for all.Next(&index, &e) {
		if e.Kind != prog.Uplink {
			continue
		}
		if l, err := netlink.LinkByIndex(int(index)); err == nil { // or it is gone
			w.uplinks = append(w.uplinks, l.Attrs().Name)
		}
	}
	if err := all.Err(); err != nil {
		unlock()
		return nil, fmt.Errorf("read the table of devices: %w", err)
	}
	return unlock, nil
}
