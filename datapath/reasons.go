package datapath

import (
	_ "embed"
	"regexp"
	"strings"
	"sync"
)

// Reason says why the datapath took an action on a packet.
type Reason struct {
	Name string // as in metrics
	Who  string // who has to act: none, client, sender, operator or developer
	Text string
}

//go:embed bpf/types.h
var typesHeader string

var reasonLine = regexp.MustCompile(`(?m)^\t/\* ([a-z]+): (.+) \*/\n\tREASON_([A-Z_]+),$`)

var reasonList = sync.OnceValue(Reasons)

// Reasons returns the reasons and their comments from enum reason in bpf/types.h, the only place that lists them.
func Reasons() (all []Reason) {
	for _, m := range reasonLine.FindAllStringSubmatch(typesHeader, -1) {
		all = append(all, Reason{strings.ToLower(m[3]), m[1], m[2]})
	}
	return all
}

// meaning returns a reason's text: what happened, and what to do.
func meaning(reason string) string {
	for _, r := range reasonList() {
		if r.Name == reason {
			return r.Text
		}
	}
	return ""
}
