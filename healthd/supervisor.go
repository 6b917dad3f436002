package healthd

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// programs supervises the programs of all exec checks. There is one per process, because the process adopts all
// orphans.
var programs = supervisor{start: make(chan starting), ended: make(chan ending)}

// supervisor starts programs, and kills and reaps the processes that they leave behind.
//
// This process is a subreaper (PR_SET_CHILD_SUBREAPER): a descendant whose parent ends becomes its child, whatever
// group and session it has moved to. A child is an orphan unless it is a running program, in a running program's
// process group, or in this process's group. When any program ends, the supervisor kills all orphans, then their
// children. A process of a program that still runs is an orphan too if it left the group and its parent has ended.
//
// A single thread starts, kills and reaps processes, and ends only with this process. The kernel then kills the
// programs (Pdeathsig). The thread has no_new_privs, so no file can give a program privileges.
type supervisor struct {
	once  sync.Once
	start chan starting
	ended chan ending
}

type starting struct {
	cmd  *exec.Cmd
	done chan<- error
}

type ending struct {
	pid int
	log *slog.Logger // may be nil
}

func (s *supervisor) run(cmd *exec.Cmd, log *slog.Logger) error {
	s.once.Do(func() { go s.supervise() })
	done := make(chan error)
	s.start <- starting{cmd, done}
	if err := <-done; err != nil {
		return err
	}
	err := cmd.Wait()
	s.ended <- ending{cmd.Process.Pid, log}
	return err
}

func (s *supervisor) supervise() {
	runtime.LockOSThread()
	refused := cmp.Or(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
		unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) // a seccomp filter may forbid them
	running := map[int]bool{}
	var log *slog.Logger
	var warned time.Time
	var again <-chan time.Time
	for {
		select {
		case x := <-s.start:
			if refused != nil {
				x.done <- fmt.Errorf("prctl: %w", refused)
				continue
			}
			err := x.cmd.Start()
			if err == nil {
				running[x.cmd.Process.Pid] = true
			}
			x.done <- err
			continue
		case x := <-s.ended:
			delete(running, x.pid)
			log = x.log
		case <-again:
		}
		again = nil
		if killed := endOrphans(running); killed > 0 {
			again = time.After(10 * time.Millisecond) // to reap them and find their children
			if log != nil && time.Since(warned) > logInterval {
				warned = time.Now()
				log.Warn("killed processes that exec checks left behind", "count", killed)
			}
		}
	}
}

// endOrphans kills and reaps children of this process that do not belong to a running program. It returns the number
// killed.
func endOrphans(running map[int]bool) (killed int) {
	// proc_pid_children(5) describes the format. Reading fails for threads that have ended.
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for field := range strings.FieldsSeq(string(text)) {
			pid, err := strconv.Atoi(field)
			if err != nil || running[pid] {
				continue // os/exec waits for it
			}
			group, err := unix.Getpgid(pid)
			if err != nil || group == unix.Getpgrp() { // not from an exec check: its parent waits for it
				continue
			}
			if reaped, _ := unix.Wait4(pid, nil, unix.WNOHANG, nil); reaped == pid || running[group] {
				continue
			}
			if unix.Kill(pid, unix.SIGKILL) == nil {
				killed++
			}
		}
	}
	return killed
}

// lacking names the capabilities that the agent lacks to run programs as another user and to kill them, or returns "".
func lacking() string {
	var have [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &have[0]); err != nil {
		return err.Error()
	}
	var names []string
	for _, x := range []struct {
		bit  int
		name string
	}{{unix.CAP_SETUID, "CAP_SETUID"}, {unix.CAP_SETGID, "CAP_SETGID"}, {unix.CAP_KILL, "CAP_KILL"}} {
		if have[0].Effective&(1<<x.bit) == 0 {
			names = append(names, x.name)
		}
	}
	return strings.Join(names, ", ")
}
