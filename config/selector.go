package config

import "regexp"

// selectorSyntax matches Kubernetes label selectors (labels.Parse): requirements such as a=b, a!=b, a, !a, a in (b,c),
// a notin (b,c), a>1, separated by commas.
var selectorSyntax = func() *regexp.Regexp {
	const (
		space = `\s*`
		name  = `[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?`
		key   = `([a-z0-9][-a-z0-9.]*/)?` + name
		value = `(` + name + `)?`
		list  = `\(` + space + value + `(` + space + `,` + space + value + `)*` + space + `\)`
		one   = `(!` + space + key + `|` + key + `(` + space + `(==?|!=|>|<)` + space + value +
			`|\s+(in|notin)` + space + list + `)?)`
	)
	return regexp.MustCompile(`^` + space + one + `(` + space + `,` + space + one + `)*` + space + `$`)
}()

// selector reads a label selector. "" selects everything.
func (t *table) selector(key string) string {
	const like = "rack=a"
	i, ok := t.get(key)
	if !ok || i.value == "" {
		return ""
	}
	s, ok := i.str(like)
	if !ok {
		return ""
	}
	if !selectorSyntax.MatchString(s) {
		i.errorf(`write one like "rack=a" or "tier in (web, api), !canary"`, "%q is not a label selector", s)
		return ""
	}
	return s
}
