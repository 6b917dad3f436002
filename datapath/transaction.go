package datapath

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cilium/ebpf"
)

// transaction is the sequence of steps in which Open puts the programs of this binary in force. A step that has
// succeeded registers how it is undone; what removes something of an earlier agent waits until all steps have
// succeeded. A nil transaction, outside Open, undoes nothing and delays nothing.
type transaction struct {
	undo  []func() error
	after []func() error
	held  []io.Closer // what undo needs
}

// keepProgram opens the program that a hook runs now, and registers that set gives it back to the hook. The kernel
// opens a program by its id only with CAP_SYS_ADMIN. Without, a rollback leaves the program of this binary there, which
// works on the same maps, and says so.
func (t *transaction) keepProgram(id ebpf.ProgramID, set func(*ebpf.Program) error) {
	if t == nil {
		return
	}
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		t.onFailure(func() error { return fmt.Errorf("restore program %d: %w", id, err) })
		return
	}
	t.onFailure(func() error { return set(prog) }, prog)
}

// onFailure registers how a step is undone.
func (t *transaction) onFailure(undo func() error, held ...io.Closer) {
	if t != nil {
		t.undo, t.held = append(t.undo, undo), append(t.held, held...)
	}
}

// onSuccess runs f after the last step.
func (t *transaction) onSuccess(f func() error) error {
	if t == nil {
		return f()
	}
	t.after = append(t.after, f)
	return nil
}

// commit runs what waited for success.
func (t *transaction) commit() error {
	var errs []error
	for _, f := range t.after {
		errs = append(errs, f())
	}
	t.close()
	return errors.Join(errs...)
}

// rollback undoes the steps, the last one first.
func (t *transaction) rollback() error {
	var errs []error
	for _, f := range slices.Backward(t.undo) {
		errs = append(errs, f())
	}
	t.close()
	return errors.Join(errs...)
}

func (t *transaction) close() {
	for _, c := range t.held {
		c.Close()
	}
	*t = transaction{}
}
