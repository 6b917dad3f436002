package pin

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cilium/ebpf"
)

// Transaction is the sequence of steps in which Open puts the programs of this binary in force. A step that has
// succeeded registers how to undo it. Removals of an earlier agent's state wait until all steps have succeeded. A nil
// transaction, as outside Open, undoes nothing and delays nothing.
type Transaction struct {
	undo  []func() error
	after []func() error
	held  []io.Closer // what undo needs
}

// KeepProgram opens the program that a hook currently runs, and registers set to restore it on failure. Opening a
// program by its id needs CAP_SYS_ADMIN. Without it, a rollback leaves this binary's program there, which works on the
// same maps, and returns an error.
func (t *Transaction) KeepProgram(id ebpf.ProgramID, set func(*ebpf.Program) error) {
	if t == nil {
		return
	}
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		t.OnFailure(func() error { return fmt.Errorf("restore program %d: %w", id, err) })
		return
	}
	t.OnFailure(func() error { return set(prog) }, prog)
}

// OnFailure registers how to undo a step.
func (t *Transaction) OnFailure(undo func() error, held ...io.Closer) {
	if t != nil {
		t.undo, t.held = append(t.undo, undo), append(t.held, held...)
	}
}

// OnSuccess runs f after the last step.
func (t *Transaction) OnSuccess(f func() error) error {
	if t == nil {
		return f()
	}
	t.after = append(t.after, f)
	return nil
}

// Commit runs the functions that waited for success.
func (t *Transaction) Commit() error {
	var errs []error
	for _, f := range t.after {
		errs = append(errs, f())
	}
	t.close()
	return errors.Join(errs...)
}

// Rollback undoes the steps, the last one first.
func (t *Transaction) Rollback() error {
	var errs []error
	for _, f := range slices.Backward(t.undo) {
		errs = append(errs, f())
	}
	t.close()
	return errors.Join(errs...)
}

func (t *Transaction) close() {
	for _, c := range t.held {
		c.Close()
	}
	*t = Transaction{}
}
