package datapath

import (
	_ "embed"
	"regexp"
	"strings"
)

// Reason explains the action on a packet.
type Reason struct {
	Name string // the label in metrics
	Who  string // must act: nobody, client, sender, operator or developer
	Text string
}

//go:embed bpf/types.h
var typesHeader string

var reasonLine = regexp.MustCompile(`(?m)^\t/\* ([a-z]+): (.+) \*/\n\tREASON_([A-Z_]+),$`)

// Reasons returns all reasons whose comment says who must act. The list in C is the only one.
func Reasons() (all []Reason) {
	for _, m := range reasonLine.FindAllStringSubmatch(typesHeader, -1) {
		all = append(all, Reason{strings.ToLower(m[3]), m[1], m[2]})
	}
	return all
}
