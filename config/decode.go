package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// decoder turns one file into a Config. It has the state that all sections share.
type decoder struct {
	file string
	// elsewhere means that the file is for another machine, which has the secrets.
	elsewhere bool
	text      string
	scanner   *scanner       // of text
	lines     map[string]int // by path, for the part scanned so far
	errs      Errors
	warnings  Errors
	onAbsent  func(path string) // for a test: called for each key of the schema that the file lacks; may be nil

	config *Config
	own    []ownAddress
	pools  poolTable
	names  map[string]string // paths of services by name
	claims map[netip.Addr][]claim

	objects map[string]string // names of the described objects, such as service "web", by path

	unchanged []*Service // by index, for ParseAfter; nil elements are decoded
}

func newDecoder(file string) *decoder {
	return &decoder{
		file: file, scanner: newScanner(""), lines: map[string]int{}, config: Default(),
		pools: poolTable{names: map[string]string{}}, names: map[string]string{}, claims: map[netip.Addr][]claim{},
		objects: map[string]string{},
	}
}

// decode stops early only if text is not TOML, because nothing reliable follows the first syntax error.
func (d *decoder) decode(text []byte, rules ...Rule) (*Config, error) {
	whole := string(text)
	values := map[string]any{}
	if _, err := toml.Decode(whole, &values); err != nil {
		d.text = stripBOM(whole)
		return nil, Errors{d.syntaxError(err)}
	}
	return d.read(whole, values, rules...)
}

// read reads the values of a whole file.
func (d *decoder) read(whole string, values map[string]any, rules ...Rule) (*Config, error) {
	d.text, d.scanner = stripBOM(whole), newScanner(whole)
	d.config.Text = whole
	d.config.Empty = strings.TrimSpace(d.text) == ""
	d.root(&table{d: d, values: values})
	for _, rule := range rules {
		rule(d.config, &Report{d})
	}
	if len(d.errs) > 0 {
		return nil, sortedByLine(d.errs)
	}
	for _, w := range sortedByLine(d.warnings) {
		d.config.Warnings = append(d.config.Warnings, w.Error())
	}
	return d.config, nil
}

// root reads each section after the sections that it refers to.
func (d *decoder) root(t *table) {
	c := d.config
	c.Force = t.str("force", "7f3a51c0")
	t.section("node", d.node)
	t.section("datapath", d.datapath)
	c.BGP = optional(t, "bgp", d.bgp)
	c.L2 = optional(t, "l2", func(l2 *table) *L2 { return d.l2(l2, t.has("kubernetes")) })
	c.Kubernetes = optional(t, "kubernetes", d.kubernetes)
	t.section("probe", d.probe)
	t.section("admin", d.admin)
	t.section("log", d.log)
	for _, p := range t.tables("pool") {
		d.pool(p)
	}
	services := t.tables("service")
	c.Services = slices.Grow(c.Services, len(services))
	for n, s := range services {
		if n < len(d.unchanged) && d.unchanged[n] != nil {
			d.keepService(s, d.unchanged[n])
		} else {
			d.service(s)
		}
	}
	d.poolsOfPeers()
	d.aggregates()
	d.warn(t)
	t.noOtherSections()
}

func (t *table) noOtherSections() {
	header := func(key string) string {
		if key == "force" {
			return key
		}
		if key == "pool" || key == "service" {
			return "[[" + key + "]]"
		}
		return "[" + key + "]"
	}
	for _, key := range slices.Sorted(maps.Keys(t.values)) {
		if slices.Contains(t.keys, key) {
			continue
		}
		var headers []string
		for _, k := range t.keys[1:] { // keys[0] is force
			headers = append(headers, header(k))
		}
		hint := "the sections are " + strings.Join(headers, ", ")
		if s := suggest(key, t.keys); s != "" {
			hint = "did you mean " + header(s) + "?"
		}
		t.at(key).errorf(hint, "no such section")
	}
}

// optional reads a section whose presence enables a feature.
func optional[T any](t *table, key string, read func(*table) *T) *T {
	sub := t.sub(key)
	if sub == nil {
		return nil
	}
	v := read(sub)
	sub.done()
	return v
}

func (d *decoder) add(to *Errors, path, object, problem, hint string) {
	*to = append(*to, Error{File: d.file, Line: d.line(path), Key: path, Object: object, Problem: problem, Hint: hint})
}

// line returns the line of a path, or of its nearest parent in the file, or 0 if there is none.
func (d *decoder) line(path string) int {
	for ok := true; ok; path, ok = parentPath(path) {
		if n := d.lineOf(path); n > 0 {
			return n
		}
	}
	return 0
}

// lineOf returns the line of a path, or 0 if the file does not contain it. It scans only as much text as necessary,
// because a file without errors needs no positions.
func (d *decoder) lineOf(path string) int {
	for d.lines[path] == 0 {
		found, more := d.scanner.next()
		if !more {
			break
		}
		for _, p := range found {
			// A table without its own header, like a in [a.b], has the position of the first header or key in it.
			for path, ok := p.Path, true; ok && d.lines[path] == 0; path, ok = parentPath(path) {
				d.lines[path] = p.Line
			}
		}
	}
	return d.lines[path]
}

// parentPath returns the path of the table or list that contains path.
func parentPath(path string) (string, bool) {
	cut := strings.LastIndexAny(path, ".[")
	return path[:max(cut, 0)], cut > 0
}

func sortedByLine(errs Errors) Errors {
	slices.SortStableFunc(errs, func(a, b Error) int { return cmp.Compare(a.Line, b.Line) })
	return errs
}

// syntaxHints map parts of the TOML parser's error texts to hints.
var syntaxHints = []struct{ part, hint string }{
	{"already been defined", "remove one of the two"},
	{"already exists", "remove one of the two"},
	{"cannot be used as an array", "write either [name] once, or [[name]] for each"},
	{"strings cannot contain newlines", `close the quote on the same line`},
	{"end table name", "write [name] on its own line, or [[name]]"},
	{"end of file", "close the open quote, [ or {"},
	{"unexpected EOF", "close the open quote, [ or {"},
	{"UTF-16", "save the file as UTF-8"},
	{"invalid UTF-8", "save the file as UTF-8"},
	{"control characters", "remove it"},
	{"invalid escape", `write \\ for a backslash`},
	{"", `a line is key = value; strings, addresses and durations need quotes, as in address = "192.0.2.1"`},
}

func (d *decoder) syntaxError(err error) Error {
	e := Error{File: d.file, Problem: "not TOML: " + err.Error()}
	var pe toml.ParseError
	if errors.As(err, &pe) {
		// The parser's line is off by one at the end of the file and at the end of a line; its offset is correct.
		start := min(max(pe.Position.Start, 0), len(d.text))
		e.Line = 1 + strings.Count(d.text[:start], "\n")
		e.Problem = "not TOML: " + strings.TrimSuffix(pe.Message, ".")
		// The parser names the key without indices. The scanner's path has them, unless the scan stopped before.
		for _, p := range scan(d.text) {
			if p.Line <= e.Line && p.Key != "" && p.Key == pe.LastKey {
				e.Key = p.Path
			}
		}
	}
	for _, h := range syntaxHints {
		if strings.Contains(e.Problem, h.part) {
			e.Hint = h.hint
			break
		}
	}
	return e
}

// table is a [section], an element of an [[array of tables]] or an inline table. Its methods read the keys of the
// schema. Keys not read before done is called are unknown.
type table struct {
	d      *decoder
	path   string
	object string
	values map[string]any
	keys   []string // read so far
}

type item struct {
	d      *decoder
	path   string // the value's path or, if key is set, the path of its table
	key    string
	object string
	value  any
}

// where returns the value's path. It is built on demand, because few items need one.
func (i item) where() string {
	if i.key == "" {
		return i.path
	}
	return joinKey(i.path, i.key)
}

func (i item) errorf(hint, problem string, args ...any) {
	i.d.add(&i.d.errs, i.where(), i.object, fmt.Sprintf(problem, args...), hint)
}

func (i item) warnf(hint, problem string, args ...any) {
	i.d.add(&i.d.warnings, i.where(), i.object, fmt.Sprintf(problem, args...), hint)
}

// at returns the item of a key, even if the file does not have it.
func (t *table) at(key string) item {
	i := item{d: t.d, path: t.path, key: key, object: t.object, value: t.values[key]}
	if key == "" {
		i.path = joinKey(t.path, key)
	}
	return i
}

// get returns the value of a key in the schema. The result is false if the file does not have it.
func (t *table) get(key string) (item, bool) {
	if !slices.Contains(t.keys, key) {
		t.keys = append(t.keys, key)
	}
	i := t.at(key)
	_, ok := t.values[key]
	if !ok && t.d.onAbsent != nil {
		t.d.onAbsent(i.where())
	}
	return i, ok
}

// need is like get, but a missing key is an error. hint shows an example.
func (t *table) need(key, hint string) (item, bool) {
	i, ok := t.get(key)
	if !ok {
		i.errorf(hint, "missing")
	}
	return i, ok
}

func (t *table) has(key string) bool {
	_, ok := t.values[key]
	return ok
}

// section reads a section that has defaults. If the file does not have it, read receives an empty table.
func (t *table) section(key string, read func(*table)) {
	sub := t.sub(key)
	if sub == nil {
		sub = &table{d: t.d, path: joinKey(t.path, key), object: t.object}
	}
	read(sub)
	sub.done()
}

// sub returns the table of a key, or nil if the key is missing or not a table.
func (t *table) sub(key string) *table {
	i, ok := t.get(key)
	if !ok {
		return nil
	}
	values, ok := i.value.(map[string]any)
	if !ok {
		hint := fmt.Sprintf("write [%s] on its own line, with its keys below", i.where())
		i.errorf(hint, "%s, but must be a table", i.what())
		return nil
	}
	return i.table(values)
}

func (i item) table(values map[string]any) *table {
	return &table{d: i.d, path: i.where(), object: i.object, values: values}
}

// tables returns the elements of an array of tables, written as [[key]] or key = [{…}].
func (t *table) tables(key string) []*table {
	i, ok := t.get(key)
	if !ok {
		return nil
	}
	hint := fmt.Sprintf("write [[%s]] for each", i.where())
	elements, ok := i.elements()
	if !ok {
		i.errorf(hint, "%s, but must be a list of tables", i.what())
		return nil
	}
	tables := make([]*table, 0, len(elements))
	for _, e := range elements {
		values, ok := e.value.(map[string]any)
		if !ok {
			e.errorf(hint, "%s, but must be a table", e.what())
			continue
		}
		tables = append(tables, e.table(values))
	}
	return tables
}

func (i item) elements() ([]item, bool) {
	var items []item
	list := i.where()
	add := func(v any) {
		items = append(items, item{d: i.d, path: list + index(len(items)), object: i.object, value: v})
	}
	switch v := i.value.(type) {
	case []any:
		items = make([]item, 0, len(v))
		for _, x := range v {
			add(x)
		}
	case []map[string]any:
		items = make([]item, 0, len(v))
		for _, x := range v {
			add(x)
		}
	default:
		return nil, false
	}
	return items, true
}

// done reports keys that are not in the schema. elsewhere are keys of other sections that users may expect here.
func (t *table) done(elsewhere ...string) {
	var unknown []string
	for key := range t.values {
		if !slices.Contains(t.keys, key) {
			unknown = append(unknown, key)
		}
	}
	slices.Sort(unknown)
	for _, key := range unknown {
		hint := "the keys here are " + strings.Join(t.keys, ", ")
		if s := suggest(key, append(slices.Clone(t.keys), elsewhere...)); s != "" {
			hint = "did you mean " + s + "?"
		}
		t.at(key).errorf(hint, "no such key")
	}
}

// inDir makes a relative file name relative to the configuration file.
func (d *decoder) inDir(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(filepath.Dir(d.file), name)
}
