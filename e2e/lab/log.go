package lab

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"sync"
)

// logLines limits the lines that a Log keeps.
const logLines = 4000

// Log keeps the last lines written to it. The zero value is ready to use. Its methods may be called from any goroutine.
type Log struct {
	mu    sync.Mutex // guards the following fields
	lines []string
	rest  []byte // an incomplete line
	tee   io.Writer
}

// Write implements io.Writer. It fails if the copy fails. The program then writes to a pipe without a reader.
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.tee != nil {
		if _, err := l.tee.Write(b); err != nil {
			return 0, err
		}
	}
	l.rest = append(l.rest, b...)
	for {
		i := bytes.IndexByte(l.rest, '\n')
		if i < 0 {
			break
		}
		l.lines = append(l.lines, string(l.rest[:i]))
		l.rest = l.rest[i+1:]
	}
	if n := len(l.lines); n > logLines {
		l.lines = append([]string(nil), l.lines[n-logLines:]...)
	}
	return len(b), nil
}

// Lines returns the lines, oldest first, including an incomplete one at the end.
func (l *Log) Lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := append([]string(nil), l.lines...)
	if len(l.rest) > 0 {
		lines = append(lines, string(l.rest))
	}
	return lines
}

// Tail returns the last n lines as one text.
func (l *Log) Tail(n int) string {
	lines := l.Lines()
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// FailureTail returns the n lines that most likely show why a program ended: the first ones of a panic, or the last
// ones. It omits debug lines about sent BGP messages.
func (l *Log) FailureTail(n int) string {
	lines := slices.DeleteFunc(l.Lines(), func(line string) bool {
		return strings.Contains(line, "component=bgp text=sent")
	})
	start := max(0, len(lines)-n)
	for i, line := range lines {
		if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") {
			start = i
			break
		}
	}
	return strings.Join(lines[start:min(len(lines), start+n)], "\n")
}

// Contains reports whether a line contains text.
func (l *Log) Contains(text string) bool {
	return slices.ContainsFunc(l.Lines(), func(line string) bool { return strings.Contains(line, text) })
}
