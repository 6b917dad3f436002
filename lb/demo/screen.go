package demo

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// screen writes the demo's output. It is used from one goroutine.
type screen struct {
	w     io.Writer
	tty   bool // w is a terminal: lines are redrawn
	color bool
	drawn time.Time // when the redrawn line was last written
	spins int
}

// newScreen detects a terminal. Colours follow NO_COLOR (no-color.org).
func newScreen(out io.Writer) *screen {
	s := &screen{w: out}
	if f, ok := out.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		s.tty = err == nil && os.Getenv("TERM") != "dumb"
	}
	s.color = s.tty && os.Getenv("NO_COLOR") == ""
	return s
}

const (
	bold  = "1"
	dim   = "2"
	red   = "31"
	green = "32"
	cyan  = "36"
)

func (s *screen) paint(code, text string) string {
	if !s.color {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// line writes one or more lines, replacing the redrawn one.
func (s *screen) line(format string, args ...any) {
	s.clear()
	fmt.Fprintf(s.w, format+"\n", args...)
}

func (s *screen) clear() {
	if s.tty && s.spins > 0 {
		fmt.Fprint(s.w, "\r\x1b[K")
		s.spins = 0
	}
}

// heading starts a step.
func (s *screen) heading(n int, title, text string) {
	s.line("\n%s  %s", s.paint(bold+";"+cyan, fmt.Sprintf("%d  %s", n, title)), s.paint(dim, text))
}

// observed writes an observation.
func (s *screen) observed(format string, args ...any) {
	s.line("   %s %s", s.paint(green, "✓"), fmt.Sprintf(format, args...))
}

// note writes details of the previous line.
func (s *screen) note(format string, args ...any) {
	for _, l := range strings.Split(fmt.Sprintf(format, args...), "\n") {
		s.line("     %s", s.paint(dim, l))
	}
}

// waiting redraws the line that shows the awaited condition, on a terminal only.
func (s *screen) waiting(what string) {
	if !s.tty || time.Since(s.drawn) < 80*time.Millisecond {
		return
	}
	s.drawn = time.Now()
	wheel := []rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
	text := []rune(strings.ReplaceAll(what, "\n", "; "))
	text = text[:min(len(text), s.columns()-6)] // a line that wraps cannot be redrawn
	fmt.Fprintf(s.w, "\r\x1b[K   %s %s", s.paint(cyan, string(wheel[s.spins%len(wheel)])), s.paint(dim, string(text)))
	s.spins++
}

// columns returns the width of the terminal.
func (s *screen) columns() int {
	if f, ok := s.w.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col >= 40 {
			return int(size.Col)
		}
	}
	return 80
}

// barWidth is the width of the longest bar, in columns.
const barWidth = 32

// bars draws counts by name, one line each.
func (s *screen) bars(counts map[string]int) {
	if len(counts) == 0 {
		return
	}
	longest := max(1, slices.Max(slices.Collect(maps.Values(counts))))
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		n := counts[name]
		bar := strings.Repeat("█", n*barWidth/longest)
		s.line("     %-4s %s %d", name, s.paint(green, fmt.Sprintf("%-*s", barWidth, bar)), n)
	}
}

// row is one line of the summary.
type row struct {
	step, result string
	took         time.Duration
	failed       bool
}

// summary writes the results of all steps.
func (s *screen) summary(rows []row) {
	width := 0
	for _, r := range rows {
		width = max(width, len([]rune(r.step)))
	}
	s.line("\n%s", s.paint(bold, "Summary"))
	for _, r := range rows {
		mark := s.paint(green, "✓")
		if r.failed {
			mark = s.paint(red, "✗")
		}
		s.line(" %s %-*s  %7s  %s", mark, width, r.step, short(r.took), r.result)
	}
}

// short formats a duration, such as "420 ms" or "1.3 s".
func short(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", max(0, d.Milliseconds()))
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// plural returns a phrase such as "1 request" or "2 requests".
func plural(n int, what string) string {
	return fmt.Sprintf("%d %s%s", n, what, cmp.Or(map[bool]string{true: "s"}[n != 1], ""))
}
