package lb

import (
	"fmt"
	"slices"
	"strings"
)

// NoService returns an error if no row belongs to the service called name, or nil. If only the namespace is missing,
// the error suggests full names.
func NoService(name string, rows []ServiceStatus) error {
	var meant []string
	for _, r := range rows {
		if r.Service == name {
			return nil
		}
		full := fmt.Sprintf("%q", r.Service)
		if strings.HasSuffix(r.Service, "/"+name) && !slices.Contains(meant, full) {
			meant = append(meant, full)
		}
	}
	if len(meant) == 0 {
		return fmt.Errorf("there is no service %q; see \"steelyard services\"", name)
	}
	return fmt.Errorf("there is no service %q; did you mean %s?", name, strings.Join(meant, " or "))
}
