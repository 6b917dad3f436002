package lab

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// errGoexit is returned when a function given to Do calls runtime.Goexit, as t.FailNow does.
var errGoexit = errors.New("the function called runtime.Goexit; call t.FailNow, t.Fatal and t.Skip outside Do")

// onThread runs f on its own operating system thread. The thread ends with f, so no other goroutine runs in the
// namespaces that f entered. onThread returns when f does. A panic in f continues in the caller.
func onThread(f func() error) error {
	type outcome struct {
		err      error
		panicked any
	}
	done := make(chan outcome, 1)
	goOnThread(func() {
		o := outcome{err: errGoexit}
		defer func() { done <- o }()
		defer func() {
			if p := recover(); p != nil {
				o.panicked = fmt.Sprintf("%v\n\n%s", p, debug.Stack())
			}
		}()
		o.err = f()
	})
	o := <-done
	if o.panicked != nil {
		panic(o.panicked)
	}
	return o.err
}

// goOnThread starts f on a thread other than the process's first one, which cannot end and whose namespaces /proc/self
// shows. If the scheduler chooses the first thread, that thread stays locked until f runs on another one.
func goOnThread(f func()) {
	found := make(chan struct{})
	start := func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		close(found)
		f()
	}
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != os.Getpid() {
			start()
			return
		}
		go start()
		<-found
		runtime.UnlockOSThread()
	}()
}
