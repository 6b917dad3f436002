package lb

import "net/netip"

type vipKey = netip.Addr

// vip is what the engine knows of one VIP at both consumers: where kernel and routes meet.
type vip struct {
	addr     netip.Addr
	wanted   int // frontends that are wanted
	held     int // frontends that the datapath holds
	serving  int // of them, those that have a backend: what makes the VIP worth announcing
	datapath Known
	announce Known
}

// vipTable has an entry for every VIP that is wanted, held or announced.
type vipTable struct{ byAddr map[vipKey]*vip }

func (t *vipTable) get(addr netip.Addr) *vip {
	v, ok := t.byAddr[addr]
	if !ok {
		v = &vip{addr: addr}
		t.byAddr[addr] = v
	}
	return v
}

// forget drops the entry of a VIP nobody knows any more.
func (t *vipTable) forget(v *vip) {
	if v.wanted == 0 && v.held == 0 && !v.announce.Maybe() && !v.datapath.Maybe() {
		delete(t.byAddr, v.addr)
	}
}
