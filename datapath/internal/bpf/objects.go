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

// Names holds the names of enumerators, indexed by value, in lower case and without their prefix.
type Names struct{ Reasons, Actions, Commits []string }

// ReadNames reads the names from the embedded object, because only the C code lists them.
func ReadNames(spec *ebpf.CollectionSpec) (n Names, err error) {
	for enum, names := range map[string]*[]string{"reason": &n.Reasons, "action": &n.Actions, "commit": &n.Commits} {
		var e *btf.Enum
		if err := spec.Types.TypeByName(enum, &e); err != nil {
			return n, fmt.Errorf("read enum %s: %w", enum, err)
		}
		*names = make([]string, len(e.Values))
		for _, v := range e.Values {
			(*names)[v.Value] = strings.TrimPrefix(strings.ToLower(v.Name), enum+"_")
		}
	}
	return n, nil
}
