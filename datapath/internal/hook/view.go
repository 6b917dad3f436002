package hook

import (
	"fmt"
	"slices"
)

// View is a snapshot of the interfaces' state.
type View struct {
	Links    map[int]LinkState
	Attached map[int]bool
}

// View returns the state as of the last change of an interface.
func (a *Hooks) View() View {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	v := View{Links: a.links, Attached: map[int]bool{}}
	for name, index := range a.index {
		if index != 0 && a.status[name].Mode != "" {
			v.Attached[index] = true
		}
	}
	return v
}

// Name returns the name of an interface.
func (v View) Name(index uint32) string {
	if l, ok := v.Links[int(index)]; ok {
		return l.Name
	}
	return fmt.Sprint("interface ", index)
}

// IsDown reports whether an interface exists and is down.
func (v View) IsDown(index int) bool {
	l, ok := v.Links[index]
	return ok && !l.Running
}

// Down returns a phrase that names the attached interfaces that are down, or "" if there are none. It continues a
// sentence.
func (v View) Down() (text string) {
	var names []string
	for index := range v.Attached {
		if v.IsDown(index) {
			names = append(names, v.Name(uint32(index)))
		}
	}
	slices.Sort(names)
	for _, name := range names {
		text += fmt.Sprintf("; %s is down", name)
	}
	return text
}

// Mode selects how programs are attached.
type Mode string

// The modes.
const (
	ModeAuto       Mode = "auto"        // native XDP where the driver has it, otherwise tc; tc on veth and bridges
	ModeXDP        Mode = "xdp"         // native XDP, and tc behind it
	ModeXDPGeneric Mode = "xdp-generic" // XDP in the stack, for drivers without native XDP, and tc behind it
	ModeTC         Mode = "tc"
)
