package bpf

import (
	"reflect"

	"github.com/cilium/ebpf"
)

// FlowTable is a table of NAT flows: one map for packets of clients and one for packets of servers.
type FlowTable struct {
	ID               GCTable
	Clients, Servers *ebpf.Map
}

// FlowTables returns the tables of NAT flows, by GCTable.
func (o *Objects) FlowTables() []FlowTable {
	return []FlowTable{
		{GCHalfOpen, o.SyHalfopenClients, o.SyHalfopenServers},
		{GCUDP, o.SyUdpClients, o.SyUdpServers},
		{GCStream, o.SyStreamClients, o.SyStreamServers},
	}
}

// PinnedMaps returns the maps that are pinned by name, by that name.
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

// XDPPass is XDP_PASS, a result of a program.
const XDPPass = 2
