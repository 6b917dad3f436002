package prog

import (
	"fmt"
	"strings"
	"sync"

	"github.com/cilium/ebpf/btf"
)

// None is the name of REASON_NONE.
const None = "none"

// Reasons returns the names of enum reason, indexed by value. It reads them from the object, because only the C code
// lists them.
var Reasons = sync.OnceValues(func() ([]string, error) {
	spec, err := LoadIn()
	if err != nil {
		return nil, fmt.Errorf("read the embedded programs: %w", err)
	}
	var enum *btf.Enum
	if err := spec.Types.TypeByName("reason", &enum); err != nil {
		return nil, fmt.Errorf("read enum reason: %w", err)
	}
	names := make([]string, len(enum.Values))
	for _, v := range enum.Values {
		names[v.Value] = strings.ToLower(strings.TrimPrefix(v.Name, "REASON_"))
	}
	return names, nil
})
