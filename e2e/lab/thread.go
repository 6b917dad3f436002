package lab

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// errGoexit is returned when a function given to Do left by runtime.Goexit, as t.FailNow does.
var errGoexit = errors.New("the function left its thread by runtime.Goexit; call t.FailNow and its kin outside Do")

// onThread runs f on an operating system thread of its own and starts no other goroutine there; the thread ends with
// f, taking with it the namespaces f entered. It returns when f does; a panic of f continues in the caller.
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

// goOnThread starts f on a thread that is not the process's first: that one cannot end, and /proc/self shows its
// namespaces. Here the first thread, when the scheduler picks it, is kept busy until f has found another.
func goOnThread(f func()) {
	found := make(chan struct{})
	start := func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
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
