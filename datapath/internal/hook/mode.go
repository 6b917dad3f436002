package hook

import (
	"fmt"
	"slices"
	"strings"
)

// Mode is how programs are attached.
type Mode string

// The modes.
const (
	ModeAuto       Mode = "auto"        // native XDP where the driver has it, otherwise tc; tc on veth and bridges
	ModeXDP        Mode = "xdp"         // native XDP, and tc behind it
	ModeXDPGeneric Mode = "xdp-generic" // XDP in the stack, for drivers without native XDP, and tc behind it
	ModeTC         Mode = "tc"
)

var modes = []Mode{ModeAuto, ModeXDP, ModeXDPGeneric, ModeTC}

// UnmarshalText accepts only the four modes.
func (m *Mode) UnmarshalText(b []byte) error {
	if !slices.Contains(modes, Mode(b)) {
		names := make([]string, len(modes))
		for i, m := range modes {
			names[i] = string(m)
		}
		return fmt.Errorf("unknown mode %q; allowed: %s", b, strings.Join(names, ", "))
	}
	*m = Mode(b)
	return nil
}
