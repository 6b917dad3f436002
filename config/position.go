package config

import (
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
)

type position struct {
	Path string // with indices: service[1].check.interval
	Key  string // as in toml.MetaData.Keys: service.check.interval; "" for a list element
	Line int
}

// scan returns the positions of all keys and list elements of a TOML document, in document order. For invalid TOML the
// result is a best effort. scan never fails and always terminates.
//
// It exists because BurntSushi/toml 1.6.0 has no positions of unknown keys and stores positions by dotted key without
// index, so it knows the lines only of the last [[service]].
func scan(text string) (all []position) {
	sc := newScanner(text)
	for {
		found, more := sc.next()
		if !more {
			return all
		}
		all = append(all, found...)
	}
}

// stripBOM removes a byte order mark, which the parser ignores.
func stripBOM(text string) string {
	for _, mark := range []string{"\xff\xfe", "\xfe\xff", "\xef\xbb\xbf"} {
		if rest, ok := strings.CutPrefix(text, mark); ok {
			return rest
		}
	}
	return text
}

type scanner struct {
	s          string
	i          int
	line       int
	found      []position     // by the last call of next
	elements   map[string]int // number of elements seen so far in each array of tables, by path
	table, key string         // from the last header
}

func newScanner(text string) *scanner {
	return &scanner{s: stripBOM(text), line: 1, elements: map[string]int{}}
}

// next returns the positions from the next header, or from the next key and its value, or false at the end. They are
// valid until the next call.
func (sc *scanner) next() (found []position, more bool) {
	sc.found = sc.found[:0]
	sc.blank(true)
	if sc.i >= len(sc.s) {
		return nil, false
	}
	if sc.s[sc.i] != '[' {
		sc.pair(sc.table, sc.key)
		return sc.found, true
	}
	array := strings.HasPrefix(sc.s[sc.i:], "[[")
	sc.i++
	if array {
		sc.i++
	}
	line := sc.line
	sc.table, sc.key = sc.header(sc.keys(), array)
	for sc.i < len(sc.s) && sc.s[sc.i] == ']' {
		sc.i++
	}
	return append(sc.found, position{sc.table, sc.key, line}), true
}

// header returns the path and the key of a [table] or [[array of tables]].
func (sc *scanner) header(parts []string, array bool) (path, key string) {
	for i, p := range parts {
		path, key = joinKey(path, p), joinKey(key, p)
		n := sc.elements[path]
		switch {
		case array && i == len(parts)-1:
			sc.elements[path]++
			path += index(n)
		case n > 0:
			path += index(n - 1) // the last element
		}
	}
	return path, key
}

func (sc *scanner) pair(path, key string) {
	line := sc.line
	for _, p := range sc.keys() {
		path, key = joinKey(path, p), joinKey(key, p)
	}
	sc.found = append(sc.found, position{path, key, line})
	sc.blank(false)
	if sc.i < len(sc.s) && sc.s[sc.i] == '=' {
		sc.i++
	}
	sc.value(path, key)
}

func (sc *scanner) value(path, key string) {
	sc.blank(true)
	if sc.i >= len(sc.s) {
		return
	}
	switch c := sc.s[sc.i]; c {
	case '"', '\'':
		sc.str()
	case '[':
		for n := 0; sc.more(']'); n++ {
			sc.found = append(sc.found, position{path + index(n), "", sc.line})
			sc.value(path+index(n), key)
		}
	case '{':
		for sc.more('}') {
			sc.pair(path, key)
		}
	default:
		sc.i++ // always advance, even in invalid TOML
		for sc.i < len(sc.s) && !strings.ContainsRune(",]}\n#", rune(sc.s[sc.i])) {
			sc.i++
		}
	}
}

// more skips the opening bracket or a comma and reports whether another element follows before the closing bracket.
func (sc *scanner) more(closing byte) bool {
	if rest := sc.s[min(sc.i, len(sc.s)):]; closing == ']' && strings.HasPrefix(rest, "[") ||
		closing == '}' && strings.HasPrefix(rest, "{") {
		sc.i++
	}
	sc.blank(true)
	for sc.i < len(sc.s) && sc.s[sc.i] == ',' {
		sc.i++
		sc.blank(true)
	}
	if sc.i >= len(sc.s) || sc.s[sc.i] == closing {
		sc.i++
		return false
	}
	return true
}

// keys reads a dotted key.
func (sc *scanner) keys() (parts []string) {
	for {
		sc.blank(false)
		if sc.i >= len(sc.s) {
			return parts
		}
		if c := sc.s[sc.i]; c == '"' || c == '\'' {
			parts = append(parts, unquote(sc.str()))
		} else {
			j := sc.i
			for j < len(sc.s) && !strings.ContainsRune(" \t\r.=]\n", rune(sc.s[j])) {
				j++
			}
			if j == sc.i {
				sc.i++
				return parts
			}
			parts = append(parts, sc.s[sc.i:j])
			sc.i = j
		}
		sc.blank(false)
		if sc.i >= len(sc.s) || sc.s[sc.i] != '.' {
			return parts
		}
		sc.i++
	}
}

// str reads a string in any of the four forms and returns it with its quotes.
func (sc *scanner) str() string {
	start, q := sc.i, sc.s[sc.i:sc.i+1]
	end := q
	if long := q + q + q; strings.HasPrefix(sc.s[sc.i:], long) {
		end = long
	}
	sc.i += len(end)
	for sc.i < len(sc.s) && !strings.HasPrefix(sc.s[sc.i:], end) {
		if sc.s[sc.i] == '\\' && q == `"` {
			sc.i++
		}
		if sc.i < len(sc.s) && sc.s[sc.i] == '\n' {
			sc.line++
		}
		sc.i++
	}
	sc.i += len(end)
	for len(end) == 3 && sc.i < len(sc.s) && sc.s[sc.i] == q[0] { // """" ends a string whose last character is a quote
		sc.i++
	}
	sc.i = min(sc.i, len(sc.s))
	return sc.s[start:sc.i]
}

func (sc *scanner) blank(newlines bool) {
	for sc.i < len(sc.s) {
		switch c := sc.s[sc.i]; {
		case c == '\n' && newlines:
			sc.line++
		case c == ' ' || c == '\t' || c == '\r':
		case c == '#' && newlines:
			for sc.i < len(sc.s) && sc.s[sc.i] != '\n' {
				sc.i++
			}
			continue
		default:
			return
		}
		sc.i++
	}
}

// unquote returns the value of a quoted key.
func unquote(quoted string) string {
	if strings.Contains(quoted, `\`) && quoted[0] == '"' {
		var v struct{ K string }
		if _, err := toml.Decode("K = "+quoted, &v); err == nil {
			return v.K
		}
	}
	return strings.Trim(quoted, quoted[:1])
}

// joinKey appends a key to a path, in quotes unless it is a bare key.
func joinKey(path, key string) string {
	if strings.IndexFunc(key, notBare) >= 0 || key == "" {
		key = strconv.Quote(key)
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

// notBare reports whether a key with this rune needs quotes.
func notBare(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' && r != '-'
}

func index(n int) string { return "[" + strconv.Itoa(n) + "]" }
