package config

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// what describes a value of the wrong type in errors.
func (i item) what() string {
	switch v := i.value.(type) {
	case string:
		return strconv.Quote(v) + " is a string"
	case int64:
		return fmt.Sprintf("%d is an integer", v)
	case float64:
		return fmt.Sprintf("%v is a fraction", v)
	case bool:
		return fmt.Sprintf("%t is a boolean", v)
	case []any, []map[string]any:
		return "is a list"
	case map[string]any:
		return "is a table"
	default:
		return "is a date or time"
	}
}

// str reads a string. like is an example without quotes.
func (i item) str(like string) (string, bool) {
	s, ok := i.value.(string)
	if !ok {
		i.errorf(fmt.Sprintf("write one like %q", like), "%s, but must be a string", i.what())
	}
	return strings.Clone(s), ok // the decoded string would keep the whole file in memory
}

// digits is like str, with a hint for an unquoted number, as in ports = [80].
func (i item) digits(like string) (string, bool) {
	if n, ok := i.value.(int64); ok {
		i.errorf(fmt.Sprintf(`write "%d"`, n), "%s, but must be a string", i.what())
		return "", false
	}
	return i.str(like)
}

// str reads the string of a key, or returns "".
func (t *table) str(key, like string) (s string) {
	if i, ok := t.get(key); ok {
		s, _ = i.str(like)
	}
	return s
}

func (t *table) boolean(key string, def bool) bool {
	i, ok := t.get(key)
	if !ok {
		return def
	}
	b, ok := i.value.(bool)
	if !ok {
		i.errorf("write true or false, without quotes", "%s, but must be true or false", i.what())
		return def
	}
	return b
}

// integer reads an integer in [low, high].
func (i item) integer(low, high int64) (int64, bool) {
	n, ok := i.value.(int64)
	if !ok {
		hint := fmt.Sprintf("write a number from %d to %d", low, high)
		if s, isString := i.value.(string); isString {
			if n, err := strconv.ParseInt(s, 10, 64); err == nil && low <= n && n <= high {
				hint = fmt.Sprintf("write %d, without quotes", n)
			}
		}
		i.errorf(hint, "%s, but must be an integer", i.what())
		return 0, false
	}
	if n < low || n > high {
		i.errorf(fmt.Sprintf("allowed: %d to %d", low, high), "%d is out of range", n)
		return 0, false
	}
	return n, true
}

func integer[T ~int | ~uint16 | ~uint32 | ~int32](t *table, key string, def T, low, high int64) T {
	i, ok := t.get(key)
	if !ok {
		return def
	}
	n, ok := i.integer(low, high)
	if !ok {
		return def
	}
	return T(n)
}

// duration reads a duration in [low, high].
func (t *table) duration(key string, def, low, high time.Duration) time.Duration {
	i, ok := t.get(key)
	if !ok {
		return def
	}
	s, ok := i.value.(string)
	if !ok {
		i.errorf(`write one like "500ms" or "2s"`, "%s, but must be a duration in quotes", i.what())
		return def
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		i.errorf(`write one like "500ms" or "2s"`, "%q is not a duration", s)
		return def
	}
	if d < low || d > high {
		i.errorf(fmt.Sprintf("allowed: %s to %s", short(low), short(high)), "%q is out of range", s)
		return def
	}
	return d
}

// seconds is like duration, but accepts only whole seconds.
func (t *table) seconds(key string, def, high time.Duration) time.Duration {
	d := t.duration(key, def, 0, high)
	if d%time.Second != 0 {
		i := t.at(key)
		next := d.Truncate(time.Second) + time.Second
		i.errorf(fmt.Sprintf("write %q", short(next)), "%q is not a whole number of seconds", i.value)
		return def
	}
	return d
}

// short formats d without zero parts: 1h, not 1h0m0s.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// list returns a list's elements, or nil if the file does not have it. like is an example of an element.
func (t *table) list(key, like string) []item {
	i, ok := t.get(key)
	if !ok {
		return nil
	}
	items, ok := i.elements()
	if !ok {
		hint := fmt.Sprintf("write [%q]", like)
		if s, isString := i.value.(string); isString && s != "" {
			hint = fmt.Sprintf("write [%q]", s)
		}
		i.errorf(hint, "%s, but must be a list", i.what())
	}
	return items
}

// some is like list, but the list is required and has at least one element. hint shows an example.
func (t *table) some(key, like, hint string) []item {
	i, ok := t.need(key, hint)
	if !ok {
		return nil
	}
	items := t.list(key, like)
	if items != nil && len(items) == 0 {
		i.errorf(hint, "is empty")
	}
	return items
}

// oneOrMore is like list, but the value may also be a single element.
func (t *table) oneOrMore(key, like string) []item {
	if i, ok := t.get(key); ok {
		if _, isList := i.elements(); !isList {
			return []item{i}
		}
	}
	return t.list(key, like)
}

// distinct reads the elements of a list with read and reports duplicates.
func distinct[T comparable](items []item, read func(item) (T, bool)) []T {
	var list []T
	for _, i := range items {
		v, ok := read(i)
		if !ok {
			continue
		}
		if slices.Contains(list, v) {
			i.errorf("remove one of the two", "%v is listed twice", v)
			continue
		}
		list = append(list, v)
	}
	return list
}

// matching reads a list of distinct strings that match a pattern. what names their kind in errors.
func (t *table) matching(key, like string, pattern *regexp.Regexp, hint, what string) []string {
	return distinct(t.list(key, like), func(i item) (string, bool) {
		s, ok := i.str(like)
		if ok && !pattern.MatchString(s) {
			i.errorf(hint, "%q is not a %s", s, what)
			return "", false
		}
		return s, ok
	})
}

// word reads one of the allowed words. what names their kind in errors.
func (i item) word(what string, allowed []string) (string, bool) {
	hint := "allowed: " + strings.Join(allowed, ", ")
	s, ok := i.value.(string)
	if !ok {
		i.errorf(hint, "%s, but must be a string", i.what())
		return "", false
	}
	k := slices.Index(allowed, s)
	if k < 0 {
		i.errorf(hint, "unknown %s %q", what, s)
		return "", false
	}
	return allowed[k], true
}

// words converts words defined in lb to strings.
func words[T ~string](list []T) []string {
	return strings.Split(lb.Words(list), ", ")
}

// word reads the word of a key, or returns def.
func word[T ~string](t *table, key, what string, def T, allowed []T) T {
	i, ok := t.get(key)
	if !ok {
		return def
	}
	s, _ := i.value.(string)
	if k := slices.Index(allowed, T(s)); k >= 0 {
		return allowed[k]
	}
	i.word(what, words(allowed)) // reports the error
	return def
}
