package agent

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
)

// toJournal reports whether w is the journal, according to JOURNAL_STREAM (systemd.exec(5)).
func toJournal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	if err != nil {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

// priorities are the journal's priorities, written as the prefix of a line (sd-daemon(3)).
var priorities = []struct {
	from   slog.Level
	prefix string
}{{slog.LevelError, "<3>"}, {slog.LevelWarn, "<4>"}, {slog.LevelInfo, "<6>"}}

// journal is a handler that begins each line with its priority.
type journal struct{ of map[string]slog.Handler }

// newJournal returns a handler that writes to w through handlers created by to.
func newJournal(w io.Writer, to func(io.Writer) slog.Handler) journal {
	j := journal{map[string]slog.Handler{"<7>": to(prefixed{w, "<7>"})}}
	for _, p := range priorities {
		j.of[p.prefix] = to(prefixed{w, p.prefix})
	}
	return j
}

// prefixed adds a prefix to each line. Each Write is one line.
type prefixed struct {
	io.Writer
	prefix string
}

func (p prefixed) Write(line []byte) (int, error) {
	if _, err := p.Writer.Write(append([]byte(p.prefix), line...)); err != nil {
		return 0, err
	}
	return len(line), nil
}

// Enabled implements slog.Handler.
func (j journal) Enabled(ctx context.Context, l slog.Level) bool { return j.of["<7>"].Enabled(ctx, l) }

// Handle implements slog.Handler.
func (j journal) Handle(ctx context.Context, r slog.Record) error {
	for _, p := range priorities {
		if r.Level >= p.from {
			return j.of[p.prefix].Handle(ctx, r)
		}
	}
	return j.of["<7>"].Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (j journal) WithAttrs(attrs []slog.Attr) slog.Handler {
	return j.each(func(h slog.Handler) slog.Handler { return h.WithAttrs(attrs) })
}

// WithGroup implements slog.Handler.
func (j journal) WithGroup(name string) slog.Handler {
	return j.each(func(h slog.Handler) slog.Handler { return h.WithGroup(name) })
}

func (j journal) each(f func(slog.Handler) slog.Handler) slog.Handler {
	next := journal{map[string]slog.Handler{}}
	for prefix, h := range j.of {
		next.of[prefix] = f(h)
	}
	return next
}
