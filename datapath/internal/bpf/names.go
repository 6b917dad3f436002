package bpf

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf/btf"
)

// enumNames returns the enumerators of a C enum by value, without their prefix and in lower case.
func enumNames(enum, prefix string) ([]string, error) {
	spec, err := LoadSy()
	if err != nil {
		return nil, fmt.Errorf("read the embedded programs: %w", err)
	}
	var e *btf.Enum
	if err := spec.Types.TypeByName(enum, &e); err != nil {
		return nil, fmt.Errorf("read enum %s: %w", enum, err)
	}
	names := make([]string, len(e.Values))
	for _, v := range e.Values {
		names[v.Value] = strings.ToLower(strings.TrimPrefix(v.Name, prefix))
	}
	return names, nil
}

// Names are the names of enumerators, by value.
type Names struct{ Reasons, Actions, Commits []string }

// ReadNames reads the names from the embedded object. The C code has the only list.
func ReadNames() (n Names, err error) {
	if n.Reasons, err = enumNames("reason", "REASON_"); err != nil {
		return n, err
	}
	if n.Actions, err = enumNames("action", "ACTION_"); err != nil {
		return n, err
	}
	n.Commits, err = enumNames("commit", "COMMIT_")
	return n, err
}
