package bpf

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf/btf"
)

// EnumNames returns the enumerators of a C enum by value, without their prefix and in lower case. The C code has the
// only list.
func EnumNames(enum, prefix string) ([]string, error) {
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

// ReasonNames returns the names of the reasons, by value.
func ReasonNames() ([]string, error) { return EnumNames("reason", "REASON_") }
