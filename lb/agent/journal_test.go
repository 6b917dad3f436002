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
)

// Lines for the journal begin with their priority, and no other lines do.
func TestJournalPriorities(t *testing.T) {
	for _, journal := range []bool{true, false} {
		f, err := os.Create(filepath.Join(t.TempDir(), "log"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var st syscall.Stat_t
		if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
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
		text, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
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
