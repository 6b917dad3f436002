package lb

import "net/netip"

type vipKey = netip.Addr

// vip is the state of one VIP at both consumers. datapathState and routes share it.
type vip struct {
	addr     netip.Addr
	wanted   int // number of wanted frontends
	held     int // number of frontends that the datapath holds
	serving  int // number of held frontends with targets; a VIP with none is not announced
	dirty    int // number of frontends whose wanted and held plan may differ
	datapath Known
	announce Known
	change   waiting // for the announcers
}

// vipTable has an entry for every VIP that is wanted, held or announced.
type vipTable struct {
	byAddr  map[vipKey]*vip
	touched map[vipKey]bool // VIPs whose state may have changed since routes last read them
	latency latency
}

func (t *vipTable) touch(addr netip.Addr) {
	if t.touched == nil {
		t.touched = map[vipKey]bool{}
	}
	t.touched[addr] = true
}

// changed records a change that may have to be announced.
func (t *vipTable) changed(addr netip.Addr) {
	t.touch(addr)
	if v, ok := t.byAddr[addr]; ok {
		v.change.changed(t.latency.at)
	}
}

func (t *vipTable) get(addr netip.Addr) *vip {
	v, ok := t.byAddr[addr]
	if !ok {
		v = &vip{addr: addr}
		t.byAddr[addr] = v
	}
	return v
}

// forget removes the entry of a VIP that is neither wanted nor held nor announced.
func (t *vipTable) forget(v *vip) {
	if v.wanted == 0 && v.held == 0 && v.dirty == 0 && !v.announce.Maybe() && !v.datapath.Maybe() {
		delete(t.byAddr, v.addr)
	}
}
