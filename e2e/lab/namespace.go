package lab

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// namespaces are the descriptors that keep a Host's two namespaces alive.
type namespaces struct {
	net, mnt *os.File
}

// newNamespaces moves the calling thread into new namespaces and returns them. The thread must be locked and stay
// locked.
func newNamespaces() (namespaces, error) {
	var none namespaces
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
		return none, fmt.Errorf("unshare network and mount namespaces (this needs root): %w", err)
	}
	if err := privateMounts(); err != nil {
		return none, err
	}
	net, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return none, err
	}
	mnt, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return none, errors.Join(err, net.Close())
	}
	return namespaces{net, mnt}, nil
}

// enter moves the calling thread, which must be locked, into n.
func (n namespaces) enter() error {
	// A thread that shares its root directory may not change its mount namespace (setns(2)).
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the root directory: %w", err)
	}
	if err := unix.Setns(int(n.mnt.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the mount namespace: %w", err)
	}
	if err := unix.Setns(int(n.net.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter the network namespace: %w", err)
	}
	return nil
}

func (n namespaces) close() error { return errors.Join(n.net.Close(), n.mnt.Close()) }

// stateDir is the state directory of the DaemonSet and the unit.
const stateDir = "/var/lib/steelyard"

// privateMounts mounts a private /run, stateDir, /sys and /sys/fs/bpf in the thread's new mount namespace. /sys must be
// new, because a sysfs shows the interfaces of the network namespace where it was mounted. The mounts below the old one
// (cgroups, tracing) move to the new one, because processes on the host may need them.
func privateMounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	below, err := mountsBelow("/sys")
	if err != nil {
		return err
	}
	moved := map[string]int{}
	defer func() {
		for _, fd := range moved {
			unix.Close(fd)
		}
	}()
	for _, path := range below {
		if path == "/sys/fs/bpf" {
			continue
		}
		fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return fmt.Errorf("clone the mounts at %s: %w", path, err)
		}
		moved[path] = fd
	}
	if err := os.MkdirAll(stateDir, 0o755); err != nil {
		return err
	}
	for _, m := range []struct{ fs, path, data string }{
		{"tmpfs", "/run", "mode=755"}, {"tmpfs", stateDir, "mode=755"},
		{"sysfs", "/sys", ""}, {"bpf", "/sys/fs/bpf", "mode=700"},
	} {
		if err := unix.Mount("steelyard-lab", m.path, m.fs, 0, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.fs, m.path, err)
		}
	}
	for path, fd := range moved {
		if err := unix.MoveMount(fd, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("move the mounts at %s: %w", path, err)
		}
	}
	return nil
}

// mountsBelow returns the topmost mount points below dir in this thread's mount namespace.
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var points []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// The fifth field is the mount point (proc_pid_mountinfo(5)).
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			points = append(points, fields[4])
		}
	}
	slices.Sort(points)
	points = slices.Compact(points)
	var top []string
	for _, p := range points {
		if len(top) == 0 || !strings.HasPrefix(p, top[len(top)-1]+"/") {
			top = append(top, p)
		}
	}
	return top, lines.Err()
}
