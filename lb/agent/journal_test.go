package agent

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Lines for the journal begin with their priority, and no other lines do.
func TestJournalPriorities(t *testing.T) {
	for _, journal := range []bool{true, false} {
		f := must.Get(os.Create(filepath.Join(t.TempDir(), "log")))(t)
		defer f.Close()
		var st syscall.Stat_t
		must.Do(t, syscall.Fstat(int(f.Fd()), &st))
		if journal {
			t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
		} else {
			t.Setenv("JOURNAL_STREAM", "1:1")
		}
		log, queue := openLog(f, config.Log{Level: slog.LevelDebug, Format: "text"}, new(slog.LevelVar))
		log = component(log, "x")
		log.Debug("a")
		log.Info("b")
		log.Warn("c")
		log.WithGroup("g").Error("d")
		queue.Flush()
		text := must.Get(os.ReadFile(f.Name()))(t)
		for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
			want := "time="
			if journal {
				want = []string{"<7>", "<6>", "<4>", "<3>"}[i] + want
			}
			if !strings.HasPrefix(line, want) || !strings.Contains(line, "component=x") {
				t.Errorf("journal %t: %q; want it to begin with %s", journal, line, want)
			}
		}
	}
}
