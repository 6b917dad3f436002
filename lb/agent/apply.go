package agent

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// trial is a configuration that is active until it is confirmed or its time ends. Until it is confirmed, it changes
// nothing on the disk, so that an agent that starts before has the previous configuration.
type trial struct {
	before  string // text of the configuration file
	until   time.Time
	timer   *time.Timer // calls end
	changes []lb.Change
}

// applyText applies text instead of the configuration file, and then replaces the file. With a time, it replaces the
// file only once confirm is called, and otherwise ends the trial after this time. name is for errors in the text.
func (l *reloader) applyText(
	name string, text []byte, force string, within time.Duration,
) (done admin.Reloaded, err error) {
	l.readiness.reloading(func() {
		if err = l.replaceable(); err != nil {
			return
		}
		var begin *trial
		store := l.store
		if within > 0 {
			begin, store = &trial{before: l.text(), until: time.Now().Add(within)}, nil
		}
		if done, err = l.activate(text, force, begin, store); err != nil {
			err = named(err, l.file, name)
		} else if begin != nil {
			begin.changes, done.ConfirmUntil = done.Changes, begin.until
			begin.timer = time.AfterFunc(within, func() { l.end(begin) })
			l.log.Info("configuration applied until it is confirmed", "until", begin.until.Format(time.RFC3339))
		}
	})
	releaseMemory()
	return done, err
}

// confirm ends the trial, and writes its configuration to the file. Its result has the drains that end.
func (l *reloader) confirm() (done admin.Reloaded, err error) {
	l.readiness.exclusive(func() {
		now := l.state.Load()
		if now.trial == nil {
			err = errors.New("no configuration waits to be confirmed: its time has ended, or it is confirmed already")
			return
		}
		done = admin.Reloaded{Config: l.file, Loaded: now.at}
		if l.drains != nil {
			done.Changes = l.drains.ended(now.trial.changes)
		}
		err = l.settle(now.trial)
	})
	return done, err
}

// settle writes the configuration of a trial to the file, and ends the trial.
func (l *reloader) settle(t *trial) error {
	if err := l.unedited(t.before); err != nil {
		return err
	}
	next := *l.state.Load()
	if err := l.store([]byte(next.text)); err != nil {
		return err
	}
	t.timer.Stop()
	next.trial = nil
	l.state.Store(&next)
	l.keep(&next)
	if l.drains != nil {
		l.drains.after(t.changes)
	}
	l.log.Info("configuration confirmed", "config", l.file)
	return nil
}

// store replaces the configuration file, or the file that a symbolic link in its place leads to.
func (l *reloader) store(text []byte) error {
	path, err := filepath.EvalSymlinks(l.file)
	if err == nil {
		err = renameio.WriteFile(path, text, 0o600, renameio.WithTempDir(filepath.Dir(path)))
	}
	return state.WriteError(l.file, err)
}

// end is called when the time of a trial is over.
func (l *reloader) end(t *trial) {
	l.readiness.reloading(func() {
		if l.state.Load().trial != t { // confirmed, or replaced by a reload
			return
		}
		l.log.Warn("configuration not confirmed in time; the previous one becomes active again")
		l.goBack(t)
	})
	releaseMemory()
}

// backInterval is the time between attempts to go back, which fail for example if a secret's file cannot be read.
const backInterval = 5 * time.Second

// goBack activates the configuration that was active before a trial.
func (l *reloader) goBack(t *trial) {
	if _, err := l.activate([]byte(t.before), "", nil, nil); err != nil {
		l.reject(err, t.before)
		l.log.Error("previous configuration rejected; trying again", "err", err)
		t.timer.Reset(backInterval)
	}
}

// goesBack reports whether a configuration ends a trial by going back. This is always permitted, and ends no drain.
func (l *reloader) goesBack(text string) bool {
	t := l.state.Load().trial
	return t != nil && t.before == text
}

// replaceable returns an error unless the file is the active one and can be replaced.
func (l *reloader) replaceable() error {
	if t := l.state.Load().trial; t != nil {
		return fmt.Errorf("another configuration waits until %s to be confirmed: \"steelyard confirm\" keeps it, "+
			"\"steelyard reload\" goes back", t.until.Format(time.TimeOnly))
	}
	if err := l.unedited(l.text()); err != nil {
		return err
	}
	path, err := filepath.EvalSymlinks(l.file)
	if err == nil {
		err = unix.Access(filepath.Dir(path), unix.W_OK)
	}
	if err != nil {
		return fmt.Errorf("the agent cannot replace %s (in Kubernetes, change the ConfigMap): %w", l.file, err)
	}
	return nil
}

// unedited returns an error unless the file has this text, because the edits would be lost.
func (l *reloader) unedited(want string) error {
	text, err := config.Read(l.file)
	if err == nil && string(text) != want {
		err = fmt.Errorf("%s was edited after it was loaded: \"steelyard reload\" applies it; or save it with "+
			"another name for apply, and write the output of \"steelyard config show\" to it", l.file)
	}
	return err
}

// named returns err with another file name in each problem of a configuration.
func named(err error, was, is string) error {
	var problems config.Errors
	if !errors.As(err, &problems) {
		return err
	}
	problems = slices.Clone(problems)
	for i := range problems {
		if problems[i].File == was {
			problems[i].File = is
		}
	}
	return problems
}
