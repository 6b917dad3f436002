package datapath

import (
	_ "embed"
	"regexp"
	"strings"
)

// Reason is why a packet went where it went.
type Reason struct {
	Name string // as metrics have it
	Who  string // may want to act: nobody, client, sender, operator or us
	Text string
}

//go:embed bpf/types.h
var typesHeader string

var reasonLine = regexp.MustCompile(`(?m)^\tREASON_([A-Z_]+), /\* ([a-z]+): (.+) \*/$`)

// Reasons returns all that say who may want to act, in the words of the only list, which is C's.
func Reasons() (all []Reason) {
	for _, m := range reasonLine.FindAllStringSubmatch(typesHeader, -1) {
		all = append(all, Reason{strings.ToLower(m[1]), m[2], m[3]})
	}
	return all
}
