//go:build faults

package agent

import (
	"os"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// A program built with the tag "faults" panics when it handles an object that $STEELYARD_FAULTS names. Each line of
// that file is a part, a space, and a string that the object's name contains. Tests of the whole program use it.
func init() {
	before = func(part lb.Part, object string) {
		text, err := os.ReadFile(os.Getenv("STEELYARD_FAULTS"))
		if err != nil {
			return // no fault at present
		}
		for line := range strings.Lines(string(text)) {
			p, name, _ := strings.Cut(strings.TrimSpace(line), " ")
			if p == string(part) && strings.Contains(object, name) {
				panic("a fault of the test")
			}
		}
	}
}
