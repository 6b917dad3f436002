package lb

import "net/netip"

type vipKey = netip.Addr

// vip is the state of one VIP at both consumers. datapathState and routes share it.
type vip struct {
	addr     netip.Addr
	wanted   int // frontends that are wanted
	held     int // frontends that the datapath holds
	serving  int // frontends that the datapath holds and that have targets; a VIP without any is not announced
	dirty    int // frontends that the datapath may not hold as wanted
	datapath Known
	announce Known
	change   waiting // for the announcers
}

// vipTable has an entry for every VIP that is wanted, held or announced.
type vipTable struct {
	byAddr  map[vipKey]*vip
	touched map[vipKey]bool // whose state may have changed since routes looked at them
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
