package bpf

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// FlowTable is a table of NAT flows: one map for the clients' packets and one for the servers' packets.
type FlowTable struct {
	ID               GCTable
	Clients, Servers *ebpf.Map
}

// FlowTables returns the tables of NAT flows, indexed by GCTable.
func (o *Objects) FlowTables() []FlowTable {
	return []FlowTable{
		{GCHalfOpen, o.SyHalfopenClients, o.SyHalfopenServers},
		{GCUDP, o.SyUdpClients, o.SyUdpServers},
		{GCStream, o.SyStreamClients, o.SyStreamServers},
	}
}

// PinnedMaps returns all maps by the name under which they are pinned.
func (o *Objects) PinnedMaps() map[string]*ebpf.Map {
	all := map[string]*ebpf.Map{}
	value := reflect.ValueOf(o.SyMaps)
	for i := range value.NumField() {
		if m, ok := value.Field(i).Interface().(*ebpf.Map); ok {
			all[value.Type().Field(i).Tag.Get("ebpf")] = m
		}
	}
	return all
}

// XDPAborted and XDPPass are program results (XDP_ABORTED, XDP_PASS).
const (
	XDPAborted = 0
	XDPPass    = 2
)

// enumNames returns the enumerators of a C enum, indexed by value, in lower case and without their prefix.
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

// Names holds the names of enumerators, indexed by value.
type Names struct{ Reasons, Actions, Commits []string }

// ReadNames reads the names from the embedded object, because only the C code lists them.
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
