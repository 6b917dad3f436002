package lb

import (
	"cmp"
	"fmt"
	"slices"
)

// Severity is what a finding means for clients.
type Severity string

const (
	SeverityWarning  Severity = "warning"  // clients are served, and something needs attention
	SeverityDegraded Severity = "degraded" // some clients are not served, or would not be after one more fault
	SeverityDown     Severity = "down"     // no client is served through this node, although some should be
)

// severities starts with the least severe.
var severities = []Severity{SeverityWarning, SeverityDegraded, SeverityDown}

// Compare is negative when s is less severe than other.
func (s Severity) Compare(other Severity) int {
	return cmp.Compare(slices.Index(severities, s), slices.Index(severities, other))
}

// Finding is a state of this node that its operator should know about. All parts of the agent report states in this
// form, so that status, log, metrics and docs/findings.md agree. The field names are a contract (docs/api.md).
type Finding struct {
	Code     string   `json:"code"` // of its FindingKind
	Severity Severity `json:"severity"`
	Object   string   `json:"object,omitempty"` // the only object concerned, such as an address, or "" if several
	Text     string   `json:"text"`             // one line that names the object and the cause
	Remedy   string   `json:"remedy,omitempty"`
}

// As returns f with another severity, for a case that is less severe than its kind.
func (f Finding) As(s Severity) Finding {
	f.Severity = s
	return f
}

// Diagnosis is the result of a check of "steelyard doctor". The field names are a contract (docs/api.md).
type Diagnosis struct {
	Check    string    `json:"check"`
	Expects  string    `json:"expects"` // what is true if there are no findings
	Findings []Finding `json:"findings"`
	NotAsked string    `json:"not_asked,omitempty"` // why the check does not apply, or is not possible
}

// FindingKind is a row of docs/findings.md.
type FindingKind struct {
	Code     string
	Severity Severity // the default; see Finding.As
	Meaning  string
	Remedy   string // "" if not needed, or contained in the text
}

// About returns a finding of this kind. The object is "" if there are several.
func (k *FindingKind) About(object, format string, args ...any) Finding {
	return Finding{k.Code, k.Severity, object, fmt.Sprintf(format, args...), k.Remedy}
}

// Each returns a finding for each text.
func (k *FindingKind) Each(texts []string) (all []Finding) {
	for _, text := range texts {
		all = append(all, k.About("", "%s", text))
	}
	return all
}

// FindingKinds lists all kinds, in the order of their registration.
var FindingKinds []*FindingKind

// kind registers a kind of finding. It panics if the code is taken.
func kind(code string, severity Severity, meaning, remedy string) *FindingKind {
	if slices.ContainsFunc(FindingKinds, func(k *FindingKind) bool { return k.Code == code }) {
		panic("lb: two kinds of finding with the code " + code)
	}
	k := &FindingKind{code, severity, meaning, remedy}
	FindingKinds = append(FindingKinds, k)
	return k
}
