package lb

import (
	"fmt"
	"net/netip"
	"slices"
)

// SetWeight is the weight that an operator has given a server of a service.
type SetWeight struct {
	DrainTarget     // its Address is valid
	Weight      int `json:"weight"` // 0 to MaxWeight
}

// String returns "3 for 192.0.2.10 of web".
func (w SetWeight) String() string { return fmt.Sprintf("%d for %s", w.Weight, w.DrainTarget) }

// weightSet is the reason given for weights that differ from the configuration.
const weightSet = "set by the operator"

// WithWeight returns d with a weight set, or as configured if it is negative.
func (d Drains) WithWeight(t DrainTarget, weight int) Drains {
	d.Weights = slices.DeleteFunc(slices.Clone(d.Weights), func(w SetWeight) bool { return w.DrainTarget == t })
	if weight >= 0 {
		d.Weights = append(d.Weights, SetWeight{t, weight})
	}
	return d
}

// WeightNames lists the weights: "3 for 192.0.2.10 of web".
func (d Drains) WeightNames() (names []string) {
	for _, w := range d.Weights {
		names = append(names, w.String())
	}
	return names
}

// weights returns the weights of a service's servers.
func (d Drains) weights(service string) map[netip.Addr]int {
	all := map[netip.Addr]int{}
	for _, w := range d.Weights {
		if w.Service == service {
			all[w.Address] = w.Weight
		}
	}
	return all
}
