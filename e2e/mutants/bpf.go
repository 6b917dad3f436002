package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// object is a BPF object. Its C source is mutated instead of the Go files of the package that is tested.
type object struct {
	source string // includes the other files, which are in the same directory
	file   string // is embedded in a Go package
	plain  []byte // the compiled source without debug information, to find mutants that are equal
}

var errEqual = errors.New("the compiler's output does not differ")

// mutants returns every mutant of the source and of the files that it includes.
func (o *object) mutants() (all []mutant, err error) {
	out, err := exec.Command("clang-14", append(flags(o.source), "-MM", o.source)...).Output()
	if err != nil {
		return nil, fmt.Errorf("list the files that %s includes: %w", o.source, err)
	}
	if o.plain, err = compile(o.source); err != nil {
		return nil, err
	}
	for _, file := range strings.Fields(strings.ReplaceAll(string(out), "\\\n", " "))[1:] {
		if filepath.Dir(file) != filepath.Dir(o.source) { // a header of Linux or libbpf
			continue
		}
		source, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		all = append(all, mutantsOfC(file, source)...)
	}
	return all, nil
}

// overlay compiles a mutant in dir, and returns a list for "go test -overlay" that replaces the object.
func (o *object) overlay(m mutant, dir string) (string, error) {
	if err := os.CopyFS(dir, os.DirFS(filepath.Dir(o.source))); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, filepath.Base(m.pos.Filename)), m.mutated(), 0o644); err != nil {
		return "", err
	}
	source := filepath.Join(dir, filepath.Base(o.source))
	plain, err := compile(source)
	if err != nil {
		return "", err
	}
	if bytes.Equal(plain, o.plain) {
		return "", errEqual
	}
	full, err := compile(source, "-g")
	if err != nil {
		return "", err
	}
	object := filepath.Join(dir, "object")
	if err := os.WriteFile(object, full, 0o644); err != nil {
		return "", err
	}
	return writeOverlay(dir, o.file, object)
}

func flags(source string) []string {
	return []string{
		"-target", "bpfel", "-mcpu=v3", "-O2", "-nostdinc", "-isystem", filepath.Join(filepath.Dir(source), "include"),
	}
}

func compile(source string, further ...string) ([]byte, error) {
	args := append(append(flags(source), further...), "-c", source, "-o", "-")
	cmd := exec.Command("clang-14", args...)
	cmd.Dir = filepath.Dir(source)
	cmd.Stderr = new(bytes.Buffer)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("compile %s: %w\n%s", source, err, cmd.Stderr)
	}
	return out, nil
}

// cTokens matches what is left out (comments, text, directives), then tokens. An asterisk or ampersand between blanks
// is an operator.
var cTokens = regexp.MustCompile(`(?m)//.*|(?s:/\*.*?\*/)|"[^"\n]*"|^[ \t]*#(?:.*\\\n)*.*` +
	`|->|<<|>>|[=!<>+-]=|&&|\|\||\+\+|--|[<>!+-]| [*/&|] |[A-Za-z_]\w*|\d\w*`)

// mutantsOfC returns every mutant of a C file.
func mutantsOfC(file string, source []byte) (all []mutant) {
	for _, at := range cTokens.FindAllIndex(source, -1) {
		was := string(source[at[0]:at[1]])
		start := at[0] + len(was) - len(strings.TrimLeft(was, " "))
		was = strings.TrimSpace(was)
		line := 1 + bytes.Count(source[:start], []byte("\n"))
		column := start - bytes.LastIndexByte(source[:start], '\n')
		now := swaps[was]
		switch was {
		case "!":
			now = []string{""}
		case "&":
			now = []string{"|"}
		case "|":
			now = []string{"&"}
		}
		for _, to := range now {
			pos := token.Position{Filename: file, Offset: start, Line: line, Column: column}
			all = append(all, mutant{pos, was, to, source})
		}
	}
	return all
}
