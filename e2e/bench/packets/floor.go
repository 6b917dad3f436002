package packets

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
)

// Floor is the path with which others are compared.
const Floor = "floor: parse, VIP, slot, IPIP"

// floors prepares the measurements of the programs in bpf/floor.bpf.c.
func (b *bench) floors() (cells []*cell, err error) {
	var objs floorObjects
	if err := loadFloorObjects(&objs, nil); err != nil {
		return nil, fmt.Errorf("load the floor programs: %w", err)
	}
	if err := fillFloor(&objs); err != nil {
		return nil, err
	}
	for _, f := range []struct {
		path
		prog *ebpf.Program
	}{
		{path{name: "floor: empty, TX", loads: []string{load1}}, objs.FloorTx},
		{path{name: "floor: parse, MAC addresses", loads: []string{load1}}, objs.FloorMacs},
		{path{name: Floor, loads: all, to: onLink}, objs.FloorIpip},
		{path{name: "floor with a lookup in an LRU table", loads: knownTCP, to: onLink}, objs.FloorLru},
		{path{name: "floor with an insert in an LRU table", loads: []string{loadSYN}, to: onLink}, objs.FloorLru},
	} {
		f.hook, f.frame, f.vary, f.want = hookXDP, clientTo(vipIPIP), varyClient, xdpTX
		for _, load := range f.loads {
			if load == load1M && b.flows < flows1M {
				continue
			}
			c, err := b.cell(f.path, load, nil, f.prog)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", f.name, load, err)
			}
			cells = append(cells, c)
		}
	}
	return cells, nil
}

func fillFloor(objs *floorObjects) error {
	if err := fillFlows(objs.FloorFlows); err != nil {
		return fmt.Errorf("fill the LRU table: %w", err)
	}
	addr := vipIPIP.As4()
	for _, proto := range []uint8{6, 17} {
		key := struct {
			Addr       [4]byte
			Port       [2]byte
			Proto, Pad uint8
		}{addr, [2]byte{0, 80}, proto, 0}
		if err := objs.FloorVips.Put(key, uint32(1)); err != nil {
			return err
		}
	}
	for i := range objs.FloorSlots.MaxEntries() {
		if err := objs.FloorSlots.Put(i, (i*2654435761>>16)%few); err != nil {
			return err
		}
	}
	for i := range objs.FloorBackends.MaxEntries() {
		b := server4(int(i % few)).As4()
		value := append(b[:], macOther...)
		value = binary.NativeEndian.AppendUint16(value, 0)
		if err := objs.FloorBackends.Put(i, value); err != nil {
			return err
		}
	}
	return nil
}

// fillFlows fills the table with flows that no packet belongs to, so each insert evicts one, as in a flood.
func fillFlows(m *ebpf.Map) error {
	const batch = 1 << 14
	keys, values := make([][16]byte, batch), make([]uint32, batch) // struct floor_flow
	for first := uint32(0); first < m.MaxEntries(); first += batch {
		for i := range keys {
			binary.NativeEndian.PutUint32(keys[i][:], first+uint32(i))
		}
		if _, err := m.BatchUpdate(keys, values, nil); err != nil {
			return err
		}
	}
	return nil
}
