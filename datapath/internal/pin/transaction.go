package pin

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cilium/ebpf"
)

// Transaction is the sequence of steps in which Open activates this binary's programs. A step that has succeeded
// registers how to undo it. Removals of a previous agent's state wait until all steps have succeeded. A nil
// transaction, as outside Open, undoes nothing and delays nothing.
type Transaction struct {
	undo  []func() error
	after []func() error
	held  []io.Closer // what undo needs; closed afterwards
}

// KeepProgram opens the program that a hook currently runs, and registers set to restore it on failure. Opening a
// program by its id needs CAP_SYS_ADMIN. Without it, Rollback returns an error and leaves this binary's program
// attached, which works with the same maps.
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

// OnFailure registers how to undo a step, and what to close when the transaction ends.
func (t *Transaction) OnFailure(undo func() error, held ...io.Closer) {
	if t != nil {
		t.undo, t.held = append(t.undo, undo), append(t.held, held...)
	}
}

// OnSuccess registers f to run after the last step. Without a transaction, it runs f immediately.
func (t *Transaction) OnSuccess(f func() error) error {
	if t == nil {
		return f()
	}
	t.after = append(t.after, f)
	return nil
}

// Commit runs the functions registered with OnSuccess.
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
