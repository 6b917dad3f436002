package hook

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// sockets lists the programs that balance this machine's own connections (bpf/sock.h).
var sockets = []struct {
	name string
	at   ebpf.AttachType
	prog func(*bpf.Objects) *ebpf.Program
}{
	{"release", ebpf.AttachCgroupInetSockRelease, func(o *bpf.Objects) *ebpf.Program { return o.SySockRelease }},
	{"connect4", ebpf.AttachCGroupInet4Connect, func(o *bpf.Objects) *ebpf.Program { return o.SyConnect4 }},
	{"connect6", ebpf.AttachCGroupInet6Connect, func(o *bpf.Objects) *ebpf.Program { return o.SyConnect6 }},
	{"peer4", ebpf.AttachCgroupInet4GetPeername, func(o *bpf.Objects) *ebpf.Program { return o.SyPeer4 }},
	{"peer6", ebpf.AttachCgroupInet6GetPeername, func(o *bpf.Objects) *ebpf.Program { return o.SyPeer6 }},
}

// socketPin returns the name of the pin of a program's link. No interface has an empty name.
func socketPin(name string) string { return PinName("", name) }

// isSocketPin reports whether a pin is one of socketPin.
func isSocketPin(pin string) bool { return strings.HasPrefix(pin, socketPin("")) }

// BalanceSockets balances this machine's own connections to a frontend that is new, if Options.LocalClients says so. If
// that fails, Findings says why, and RepairSockets tries again.
func (a *Hooks) BalanceSockets() {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	if !a.o.LocalClients {
		return
	}
	if !a.sockets {
		a.sockets = true
		a.socketsFault = a.attachSockets()
	}
	if a.socketsFault == nil {
		a.Flows.EndStrays()
	}
}

// BalancesSockets reports whether this machine's own connections are balanced.
func (a *Hooks) BalancesSockets() bool {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	return a.sockets && a.socketsFault == nil
}

// RepairSockets attaches again what was detached.
func (a *Hooks) RepairSockets() {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	if !a.sockets {
		return
	}
	missing := a.inspectSockets()
	if missing == nil {
		return
	}
	attached := a.socketsFault == nil
	if a.socketsFault = a.attachSockets(); a.socketsFault != nil {
		return
	}
	if attached {
		path, _, _ := Cgroup()
		a.repaired("programs", "programs attached again", "cgroup", path, "reason", missing)
	}
	a.Flows.EndStrays()
}

func (a *Hooks) inspectSockets() error {
	for _, s := range sockets {
		if err := a.runs(socketPin(s.name), rootInode, s.prog(a.Objects)); err != nil {
			return err
		}
	}
	return nil
}

// attachSockets ignores links without a pin: they may belong to an agent in another network namespace.
func (a *Hooks) attachSockets() error {
	path, id, err := Cgroup()
	if err == nil {
		_, err = NetworkNamespace()
	}
	if err != nil {
		for _, s := range sockets { // of an agent that could
			err = errors.Join(err, a.unpin(socketPin(s.name)))
		}
		return err
	}
	for _, s := range sockets {
		prog := s.prog(a.Objects)
		err := a.pinned(place{
			pin: socketPin(s.name), index: id, prog: prog,
			attach: func() (link.Link, error) {
				return link.AttachCgroup(link.CgroupOptions{Path: path, Attach: s.at, Program: prog})
			},
			links: func() ([]link.ID, error) { return nil, nil },
		})
		if err != nil {
			return fmt.Errorf("attach %s to %s: %w", s.name, path, err)
		}
	}
	return nil
}

// NetworkNamespace returns the cookie of this process's network namespace (socket(7), SO_NETNS_COOKIE, Linux 5.14).
func NetworkNamespace() (cookie uint64, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	}
	if err != nil {
		return 0, fmt.Errorf("read the cookie of the network namespace: %w", err)
	}
	return cookie, nil
}

// rootInode is the inode and the id of the cgroup that has all processes of the machine. In a container, a mount may
// begin at the container's cgroup; the manifest mounts the machine's as well.
const rootInode = 1

// Cgroup returns the path and id of the cgroup of all processes. It is of version 2, alone or beside version 1.
func Cgroup() (path string, id int, err error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", 0, fmt.Errorf("find the cgroup of all processes: %w", err)
	}
	for line := range strings.Lines(string(mounts)) { // proc_pid_mountinfo(5)
		mount, source, _ := strings.Cut(line, " - ")
		fields := strings.Fields(mount)
		if !strings.HasPrefix(source, "cgroup2 ") || len(fields) < 5 {
			continue
		}
		path = fields[4]
		if file, err := os.Stat(path); err == nil && file.Sys().(*syscall.Stat_t).Ino == rootInode {
			return path, rootInode, nil
		}
	}
	if path == "" {
		return "", 0, errors.New("cgroup version 2 is not mounted")
	}
	return "", 0, fmt.Errorf("%s is not the cgroup of all processes; the agent runs in a container", path)
}
