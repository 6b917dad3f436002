package events

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// open returns the history in a directory, and a logger that fills it. The log itself starts at WARN.
func open(t *testing.T, dir string) (*History, *slog.Logger) {
	t.Helper()
	h := must.Get(Open(dir))(t)
	return h, slog.New(h.Handler(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelWarn})))
}

// texts returns the kinds and texts of the events that f selects.
func texts(h *History, f Filter) (all []string) {
	list, _, _ := h.After(0, f)
	for _, e := range list {
		all = append(all, e.Kind+" "+e.Text)
	}
	return all
}

// Records from INFO up are events, whatever the level of the log. They survive the end of the agent, even one in the
// middle of a write.
func TestHistoryKeepsTheLog(t *testing.T) {
	dir := t.TempDir()
	h, log := open(t, dir)
	log.Debug("not kept")
	log.With("component", "health").Warn("backend unhealthy", "service", "web",
		"err", errors.New("a\x1b[2J"+strings.Repeat("x", 999)))
	log.With("component", "routes").Info("route announced", "services", "dns web")
	must.Do(t, h.Flush())
	f := must.Get(os.OpenFile(h.newer, os.O_APPEND|os.O_WRONLY, 0))(t)
	fmt.Fprint(f, `{"time":"2026-`)
	f.Close()
	for range 2 {
		h, log = open(t, dir)
		log.Info("agent started")
		must.Do(t, h.Flush())
	}
	const down, up, start = "health backend unhealthy", "routes route announced", "agent agent started"
	for _, tt := range []struct {
		f    Filter
		want []string
	}{
		{Filter{}, []string{down, up, start, start}},
		{Filter{Service: "web"}, []string{down, up}},
		{Filter{Service: "dns"}, []string{up}},
		{Filter{Kind: "health"}, []string{down}},
		{Filter{Since: time.Now().Add(time.Hour)}, nil},
	} {
		must.Row(t, tt.f, tt.want, texts(h, tt.f))
	}
	list, err := Read(dir, Filter{Kind: "health"})
	must.True(t, err == nil && len(list) == 1 && list[0].Level == "warn" && len(list[0].Fields["err"]) <= 300,
		"in the files: %+v, %v", list, err)
}

// Neither memory nor disk grows beyond the last 10,000. A reader that follows misses none.
func TestHistoryIsBounded(t *testing.T) {
	dir := t.TempDir()
	h, log := open(t, dir)
	seen, n := 0, 0
	for i := range 3 * most {
		log.Info(fmt.Sprint(i))
		if i%1000 == 999 {
			must.Do(t, h.Flush())
			var list []Event
			list, n, _ = h.After(n, Filter{})
			seen += len(list)
		}
	}
	must.Equal(t, 3*most, seen)
	list, err := Read(dir, Filter{})
	must.True(t, err == nil && len(list) >= most/2 && len(list) <= most &&
		list[len(list)-1].Text == fmt.Sprint(3*most-1), "%d events in the files, %v", len(list), err)
	n = len(texts(h, Filter{}))
	must.True(t, n <= most, "%d events in memory", n)
}

// Failing to write, as on a full disk, is a problem until a write succeeds.
func TestHistoryWithoutDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	h, log := open(t, dir)
	log.Info("first")
	problems := make(chan error, 100)
	go h.Run(t.Context(), func(err error) { problems <- err })
	err := <-problems
	must.Need(t, err != nil, "no problem without a directory")
	must.Do(t, os.Mkdir(dir, 0o700))
	for err := range problems {
		if err == nil {
			break
		}
	}
	must.Equal(t, 1, len(must.Get(Read(dir, Filter{}))(t)))
}
