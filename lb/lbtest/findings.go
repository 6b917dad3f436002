package lbtest

import "github.com/steelyard-lb/steelyard/lb"

// Texts returns the texts of findings.
func Texts(all []lb.Finding) (texts []string) {
	for _, f := range all {
		texts = append(texts, f.Text)
	}
	return texts
}
