package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/renameio/v2"
)

// historyMax is how many texts a History keeps.
const historyMax = 10

// History is a directory with the last texts of a file, each in a file of its own that an operator can copy back. The
// names begin with a number, because a clock may go back.
type History struct{ dir, suffix string }

// NewHistory returns the history in a directory, which need not exist. The names of its files end in suffix.
func NewHistory(dir, suffix string) *History { return &History{dir, suffix} }

// Last returns the newest text, or false if there is none.
func (h *History) Last() (text string, found bool, err error) {
	names, err := h.names()
	if err != nil || len(names) == 0 {
		return "", false, err
	}
	b, err := os.ReadFile(filepath.Join(h.dir, names[len(names)-1]))
	return string(b), err == nil, err
}

// Add adds text, unless it is already the newest entry, and removes the oldest ones.
func (h *History) Add(text string, at time.Time) error {
	if err := h.add(text, at); err != nil {
		return WriteError(h.dir, err)
	}
	return nil
}

func (h *History) add(text string, at time.Time) error {
	if last, found, err := h.Last(); err != nil || found && last == text {
		return err
	}
	if err := os.MkdirAll(h.dir, 0o700); err != nil {
		return err
	}
	names, err := h.names()
	if err != nil {
		return err
	}
	n := 0
	if len(names) > 0 {
		if _, err := fmt.Sscanf(names[len(names)-1], "%d", &n); err != nil {
			return err
		}
	}
	name := fmt.Sprintf("%06d-%s%s", n+1, at.UTC().Format("20060102T150405Z"), h.suffix)
	if err := renameio.WriteFile(filepath.Join(h.dir, name), []byte(text), 0o600); err != nil {
		return err
	}
	for _, old := range names[:max(0, len(names)+1-historyMax)] {
		if err := os.Remove(filepath.Join(h.dir, old)); err != nil {
			return err
		}
	}
	return nil
}

// names returns the names of the files, oldest first.
func (h *History) names() ([]string, error) {
	entries, err := os.ReadDir(h.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), h.suffix) && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, err
}
