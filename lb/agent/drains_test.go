package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fakeEngine has one service, web.
type fakeEngine struct {
	drains []lb.Drains
	err    error
}

func (e *fakeEngine) Status(context.Context) (lb.Status, error) {
	return lb.Status{Services: []lb.ServiceStatus{{Service: "web"}}}, e.err
}

func (e *fakeEngine) Drain(d lb.Drains) { e.drains = append(e.drains, d) }

func TestDrainStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state") // does not exist before the first drain
	e := new(fakeEngine)
	store, err := openDrainStore(dir, e, newProblems(discard))
	if err != nil || len(e.drains) > 0 {
		t.Fatalf("without a file: %v, engine %v", err, e.drains)
	}
	for _, tt := range []struct {
		service string
		on      bool
		want    lb.Drains
	}{
		{"web", true, lb.Drains{Services: []string{"web"}}},
		{"", true, lb.Drains{Node: true, Services: []string{"web"}}},
		{"web", false, lb.Drains{Node: true, Services: []string{}}},
	} {
		got, err := store.set(t.Context(), tt.service, tt.on)
		if d := cmp.Diff(tt.want, got); d != "" || err != nil {
			t.Errorf("%q %t: %v, -want +got:\n%s", tt.service, tt.on, err, d)
		}
		if d := cmp.Diff(tt.want, e.drains[len(e.drains)-1]); d != "" {
			t.Errorf("%q %t: the engine has, -want +got:\n%s", tt.service, tt.on, d)
		}
		// A later agent starts with the same drains.
		next := new(fakeEngine)
		_, err = openDrainStore(dir, next, newProblems(discard))
		must.True(t, err == nil && len(next.drains) == 1 && cmp.Diff(tt.want, next.drains[0]) == "",
			"%q %t: a later agent: %v, %v", tt.service, tt.on, err, next.drains)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 || files[0].Name() != "drained.json" {
		t.Errorf("files: %v, %v; want drained.json alone", files, err)
	}
}

// A drain that is refused changes neither the file nor the engine.
func TestDrainStoreRefuses(t *testing.T) {
	dir := t.TempDir()
	e := new(fakeEngine)
	store := must.Get(openDrainStore(dir, e, newProblems(discard)))(t)
	refused := func(what, want string) {
		t.Helper()
		got, err := store.set(t.Context(), strings.Fields(what)[0], true)
		changed := len(got.Services) > 0 || got.Node || len(e.drains) > 0
		if err == nil || !strings.HasPrefix(err.Error(), want) || changed {
			t.Errorf("%s: %v, %v, engine %v; want error %s…", what, got, err, e.drains, want)
		}
	}
	const noMail = `there is no service "mail"; see "steelyard services"`
	refused("mail", noMail)
	if _, err := store.set(t.Context(), "mail", false); err == nil || err.Error() != noMail {
		t.Errorf("undrained: %v; want %s", err, noMail)
	}
	store.waiting = func() []lb.ServiceStatus { return []lb.ServiceStatus{{Service: "default/new"}} }
	refused("default/new", `service "default/new" has no address yet, so there is nothing to drain`)
	refused("new", `there is no service "new"; did you mean "default/new"?`)
	e.err = errors.New("no answer")
	refused("web", "no answer")
	e.err = nil
	if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
		t.Errorf("files: %v, %v; want none", files, err)
	}
}

// A drain that cannot be stored is in force, is a problem in the status, and is stored when that is possible.
func TestDrainThatCannotBeStored(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "drained.json")
	e, p := new(fakeEngine), newProblems(discard)
	store := must.Get(openDrainStore(dir, e, p))(t)
	store.kept.interval = 5 * time.Millisecond
	go store.kept.run(t.Context())
	must.Do(t, os.Mkdir(path, 0o700))
	want := lb.Drains{Services: []string{"web"}}
	got, err := store.set(t.Context(), "web", true)
	if err != nil || cmp.Diff(want, got) != "" || len(e.drains) != 1 || cmp.Diff(want, e.drains[0]) != "" {
		t.Fatalf("%v, %v, engine %v; want %v in force", got, err, e.drains, want)
	}
	problem := []string{
		"drains not stored, a restart of the agent undoes the last change: write " + path + ": file exists",
	}
	must.Equal(t, problem, lbtest.Texts(p.findings()))
	if _, err := openDrainStore(dir, e, p); err == nil || !strings.HasPrefix(err.Error(), "read the drains from "+dir) {
		t.Errorf("a directory instead of the file: %v", err)
	}
	must.Do(t, os.Remove(path))
	eventually(t, "no problem", func() bool { return len(lbtest.Texts(p.findings())) == 0 })
	next := new(fakeEngine)
	_, err = openDrainStore(dir, next, p)
	must.True(t, err == nil && len(next.drains) == 1 && cmp.Diff(want, next.drains[0]) == "",
		"a later agent: %v, %v; want %v", err, next.drains, want)
}

func TestDrainStoreOfWrongFile(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(dir, "drained.json"), []byte("{"), 0o600))
	e := new(fakeEngine)
	if _, err := openDrainStore(dir, e, newProblems(discard)); err == nil || len(e.drains) > 0 {
		t.Errorf("error %v, engine %v; want an error and no drain", err, e.drains)
	}
}

// A drained service that was deleted since can be undrained.
func TestUndrainDeleted(t *testing.T) {
	e := new(fakeEngine)
	store := must.Get(openDrainStore(t.TempDir(), e, newProblems(discard)))(t)
	store.current = lb.Drains{Services: []string{"deleted"}}
	if got, err := store.set(t.Context(), "deleted", false); err != nil || len(got.Services) > 0 {
		t.Errorf("%v, %v; want no drains", got, err)
	}
}
