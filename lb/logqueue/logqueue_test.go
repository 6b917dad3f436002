package logqueue

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func report(w io.Writer, lines int) error {
	_, err := fmt.Fprintln(w, Lost(lines))
	return err
}

// While nobody reads the pipe, no Write blocks. When somebody reads, the lines arrive in order, with the number of lost
// lines in their place.
func TestNeverBlocks(t *testing.T) {
	r, w, err := os.Pipe()
	must.Do(t, err)
	defer r.Close()
	const lines = 2 * size / 100
	q := New(w, report)
	for n := range lines {
		fmt.Fprintf(q, "%0*d\n", 99, n)
	}
	p := fmt.Sprint(q.Problems())
	must.True(t, strings.HasSuffix(p, " lines of the log were lost]"), "problem %q", p)
	go func() { q.Flush(); fmt.Fprintln(q, "last"); q.Flush(); w.Close() }()
	next, lost := 0, 0
	for s := bufio.NewScanner(r); s.Scan(); {
		switch {
		case s.Text() == "last":
		case strings.Contains(s.Text(), "lost"):
			_, err := fmt.Sscanf(s.Text(), "%d lines of the log were lost", &lost)
			must.True(t, err == nil && s.Text() == q.Problems()[0],
				"report %q, problem %q, %v", s.Text(), q.Problems(), err)
			next += lost
		default:
			must.Need(t, s.Text() == fmt.Sprintf("%0*d", 99, next), "line %s; want %d", s.Text(), next)
			next++
		}
	}
	must.True(t, lost != 0 && next == lines, "%d of %d lines are lost, %d accounted for", lost, lines, next)
}

// refusing is a writer that refuses lines, like a pipe without a reader.
type refusing struct {
	strings.Builder
	err error
}

func (w *refusing) Write(p []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	return w.Builder.Write(p)
}

// Lines that a writer refuses are lost, which is reported as soon as it accepts lines again.
func TestRefusedLinesAreReported(t *testing.T) {
	out := &refusing{err: errors.New("no reader")}
	q := New(out, report)
	fmt.Fprint(q, "1\n2\n")
	q.Flush()
	must.Equal(t, []string{Lost(2)}, q.Problems())
	out.err = nil
	fmt.Fprint(q, "3\n")
	q.Flush()
	must.Equal(t, Lost(2)+"\n3\n", out.String())
	q.lostAt = q.lostAt.Add(-recent)
	p := q.Problems()
	must.True(t, p == nil, "problem %q after %s", p, recent)
}
