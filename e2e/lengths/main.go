// Lengths lists Go and C files of more than 400 lines, lines of more than 120 columns, and unusual words. Its exit
// status is 1 if there are any. A tab counts as 4 columns. It skips generated files, the kernel headers in
// datapath/bpf/include, and wide lines that cannot be broken: directives and lines without a space.
package main

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unicode/utf8"
)

const (
	maxColumns = 120
	maxLines   = 400
	tabWidth   = 4
)

// unusual matches words that have more usual synonyms: forever, rarely, in the meantime, synthetic, instead of, as
// well.
var unusual = regexp.MustCompile(
	`(?i)\bfor\s+ever\b|\bseldo[m]\b|\bmeanwhil[e]\b|\bmade\s+packet|\bin\s+place\s+of\b|, too(["*.:;]|$)`)

func main() {
	found, err := check(os.Stdout, os.DirFS("."))
	if err != nil {
		fmt.Fprintln(os.Stderr, "lengths:", err)
	}
	if found || err != nil {
		os.Exit(1)
	}
}

// check reports to out, and returns whether it reported anything.
func check(out io.Writer, tree fs.FS) (found bool, err error) {
	report := func(format string, args ...any) {
		found = true
		fmt.Fprintf(out, format+"\n", args...)
	}
	err = fs.WalkDir(tree, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if path != "." && strings.HasPrefix(d.Name(), ".") || strings.HasSuffix(path, "bpf/include") {
				return fs.SkipDir
			}
			return nil
		}
		if ext := filepath.Ext(path); ext != ".go" && ext != ".c" && ext != ".h" {
			return nil
		}
		text, err := fs.ReadFile(tree, path)
		if err != nil || generated(text) {
			return err
		}
		lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
		if len(lines) > maxLines {
			report("%s has %d lines, more than %d", path, len(lines), maxLines)
		}
		for i, line := range lines {
			if n := columns(line); n > maxColumns && breakable(line) {
				report("%s:%d has %d columns, more than %d", path, i+1, n, maxColumns)
			}
			if word := unusual.FindString(line); word != "" {
				report("%s:%d: %q is unusual", path, i+1, word)
			}
		}
		return nil
	})
	return found, err
}

func generated(text []byte) bool {
	first, _, _ := bytes.Cut(text, []byte("\n"))
	return bytes.HasPrefix(first, []byte("// Code generated ")) || bytes.HasPrefix(first, []byte("/* Code generated "))
}

func columns(line string) int {
	return utf8.RuneCountInString(line) + (tabWidth-1)*strings.Count(line, "\t")
}

func breakable(line string) bool {
	return !strings.HasPrefix(line, "//go:") && strings.Contains(strings.TrimSpace(line), " ")
}
