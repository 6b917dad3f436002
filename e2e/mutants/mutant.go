package main

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
)

// mutant is a change of one token or statement in a file.
type mutant struct {
	pos      token.Position
	was, now string
	source   []byte
}

func (m mutant) String() string {
	now := m.now
	if now == "" {
		now = "(deleted)"
	}
	return fmt.Sprintf("%s:%d:%d: %s → %s", relative(m.pos.Filename), m.pos.Line, m.pos.Column, oneLine(m.was), now)
}

func relative(file string) string {
	if wd, err := os.Getwd(); err == nil {
		if rel, err := filepath.Rel(wd, file); err == nil && !strings.HasPrefix(rel, "..") {
			return rel
		}
	}
	return file
}

func oneLine(s string) string {
	first, rest, _ := strings.Cut(s, "\n")
	if rest != "" {
		first += "…"
	}
	return first
}

// mutated returns the file with the change.
func (m mutant) mutated() []byte {
	at := m.pos.Offset
	return []byte(string(m.source[:at]) + m.now + string(m.source[at+len(m.was):]))
}

// overlay writes the changed file and the list for "go test -overlay" to dir, and returns the list's name.
func (m mutant) overlay(dir string) (string, error) {
	changed := filepath.Join(dir, "mutant.go")
	if err := os.WriteFile(changed, m.mutated(), 0o644); err != nil {
		return "", err
	}
	return writeOverlay(dir, m.pos.Filename, changed)
}

func writeOverlay(dir, file, by string) (string, error) {
	text, err := json.Marshal(map[string]any{"Replace": map[string]string{file: by}})
	if err != nil {
		return "", err
	}
	list := filepath.Join(dir, "overlay.json")
	return list, os.WriteFile(list, text, 0o644)
}

// swaps are the replacements for each operator, keyword and constant.
var swaps = map[string][]string{
	"==": {"!="}, "!=": {"=="}, "<": {"<=", ">="}, "<=": {"<", ">"}, ">": {">=", "<="}, ">=": {">", "<"},
	"&&": {"||"}, "||": {"&&"}, "+": {"-"}, "-": {"+"}, "*": {"/"}, "/": {"*"},
	"+=": {"-="}, "-=": {"+="}, "++": {"--"}, "--": {"++"},
	"continue": {"break"}, "break": {"continue"}, "true": {"false"}, "false": {"true"}, "0": {"1"}, "1": {"0"},
}

// mutantsOf returns every mutant of a file, or none if it is generated.
func mutantsOf(file string) ([]mutant, error) {
	source, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, file, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil || ast.IsGenerated(tree) {
		return nil, err
	}
	f := finder{set: set, source: source}
	ast.Inspect(tree, f.visit)
	return f.found, nil
}

type finder struct {
	set    *token.FileSet
	source []byte
	found  []mutant
}

func (f *finder) visit(node ast.Node) bool {
	switch n := node.(type) {
	case *ast.ImportSpec:
		return false
	case *ast.BinaryExpr:
		if n.Op != token.ADD || !isString(n.X) && !isString(n.Y) {
			f.swap(n.OpPos, n.Op.String())
		}
	case *ast.UnaryExpr:
		if n.Op == token.NOT {
			f.add(n.OpPos, "!", "")
		}
	case *ast.AssignStmt:
		f.swap(n.TokPos, n.Tok.String())
	case *ast.IncDecStmt:
		f.swap(n.TokPos, n.Tok.String())
	case *ast.BranchStmt:
		f.swap(n.TokPos, n.Tok.String())
	case *ast.Ident:
		f.swap(n.Pos(), n.Name)
	case *ast.BasicLit:
		f.swap(n.Pos(), n.Value)
	case *ast.ReturnStmt:
		f.returned(n)
	case *ast.ExprStmt:
		if isLog(n.X) {
			return false
		}
		f.add(n.Pos(), f.text(n), "")
	case *ast.DeferStmt:
		f.add(n.Pos(), f.text(n), "")
	}
	return true
}

// returned adds the mutants of a return statement: an early return is removed, and an error is dropped.
func (f *finder) returned(n *ast.ReturnStmt) {
	if len(n.Results) == 0 {
		f.add(n.Pos(), "return", "")
		return
	}
	if last, ok := n.Results[len(n.Results)-1].(*ast.Ident); ok && last.Name == "err" {
		f.add(last.Pos(), "err", "nil")
	}
}

func (f *finder) swap(at token.Pos, was string) {
	for _, now := range swaps[was] {
		f.add(at, was, now)
	}
}

func (f *finder) add(at token.Pos, was, now string) {
	f.found = append(f.found, mutant{f.set.Position(at), was, now, f.source})
}

func (f *finder) text(n ast.Node) string {
	return string(f.source[f.set.Position(n.Pos()).Offset:f.set.Position(n.End()).Offset])
}

func isString(x ast.Expr) bool {
	lit, ok := x.(*ast.BasicLit)
	return ok && lit.Kind == token.STRING
}

// isLog reports whether x calls a logger, something named log or slog.
func isLog(x ast.Expr) bool {
	call, ok := x.(*ast.CallExpr)
	if !ok {
		return false
	}
	method, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	switch on := method.X.(type) {
	case *ast.Ident:
		return strings.HasSuffix(strings.ToLower(on.Name), "log")
	case *ast.SelectorExpr:
		return strings.HasSuffix(strings.ToLower(on.Sel.Name), "log")
	}
	return false
}
