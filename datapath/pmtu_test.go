package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// sentByTunnel runs a packet of 1380 bytes of payload and returns what was sent, from the IP header on.
func (fx *fixture) sentByTunnel() []byte {
	fx.t.Helper()
	p := tcp(dptest.ACK)(fx)
	p.Payload = make([]byte, 1380)
	r := fx.run(p.Frame())
	if r.did != "sent" || r.out.Inner == nil {
		fx.t.Fatalf("%s: %s", r.did, r.reason)
	}
	return r.frame[14:]
}

// report is an ICMP error of a router with a path MTU, which quotes these bytes.
func (fx *fixture) report(mtu uint32, quoted []byte) dptest.Packet {
	to, _ := netip.AddrFromSlice(quoted[12:16])
	p := dptest.Packet{Src: fx.at("router", 0), Proto: dptest.ICMP, Type: 3, Code: 4, Rest: mtu, Payload: quoted}
	if fx.v6 {
		to, _ = netip.AddrFromSlice(quoted[8:24])
		p.Proto, p.Type, p.Code = dptest.ICMPv6, 2, 0
	}
	p.Dst = netip.AddrPortFrom(to, 0)
	return p
}

// A path MTU is believed when the quoted packet may be one of ours, and never below what the family demands.
func TestForgedPathMTU(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		for _, encap := range []lb.Encap{lb.EncapIPIP, lb.EncapGUE} {
			fx := shared(t, h, v6, nil)
			fx.serve(tunnel(encap), "b1")
			sent := fx.sentByTunnel()
			long, short := sent[:500], sent[:28]
			head, protoAt := 20, 9
			if v6 {
				head, protoAt, short = 40, 6, sent[:48]
			}
			quote := func(part []byte, change func(q []byte)) []byte {
				q := append([]byte(nil), part...)
				change(q)
				return q
			}
			same := func([]byte) {}
			inner := head
			if encap == lb.EncapGUE {
				inner += 12
			}
			vipAt := inner + 19 // the last byte of the inner destination
			if v6 {
				vipAt = inner + 39
			}
			b1 := bpf.ToAddr(fx.addr("b1"))
			learned := func() (path bpf.PMTU) {
				if err := fx.d.objects.SyPmtu.Lookup(b1, &path); err != nil {
					t.Fatal(err)
				}
				return path
			}
			for _, c := range []struct {
				name     string
				mtu      uint32
				quote    []byte
				believed bool
			}{
				{"below the minimum", 1279, quote(long, same), false},
				{"not below the packet", uint32(len(sent)), quote(long, same), false},
				{"from another source", 1300, quote(long, func(q []byte) {
					other := fx.addr("elsewhere").AsSlice()
					copy(q[head-2*len(other):], other)
				}), false},
				{"to another server", 1300, quote(long, func(q []byte) { q[head-1] ^= 1 }), false},
				{"of another protocol", 1300, quote(long, func(q []byte) { q[protoAt] = dptest.TCP }), false},
				{"to another VIP", 1300, quote(long, func(q []byte) { q[vipAt] ^= 1 }), false},
				{"not by GUE", 1300, quote(long, func(q []byte) {
					if encap == lb.EncapGUE {
						q[head] = 0x30 // source port 12288
					} else {
						q[vipAt] ^= 2
					}
				}), false},
				{"a short quote", 1350, quote(short, same), false},
				{"a long quote", 1320, quote(long, same), true},
				{"larger than before", 1400, quote(long, same), false},
				{"lower than before", 1310, quote(long, same), true},
			} {
				was := learned()
				r := fx.run(fx.report(c.mtu, c.quote).Frame())
				want := map[bool]string{false: "not_ours", true: "pmtu_learned"}[c.believed]
				now := learned()
				if r.reason == "unsupported_protocol" { // dropped: its destination is a VIP
					want = r.reason
				}
				if r.reason != want || c.believed != (now.Mtu == c.mtu) || !c.believed && now != was {
					t.Errorf("%s, %s: %s: %s; the MTU was %d and is %d",
						encap, c.name, r.did, r.reason, was.Mtu, now.Mtu)
				}
			}
		}
	})
}

// A path MTU never makes an IPv6 packet of 1280 bytes too big: its sender cannot make it smaller.
func TestSmallestPacketIsNeverTooBig(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, true, nil)
		fx.serve(tunnel(lb.EncapIPIP), "b1")
		path := bpf.PMTU{Seen: uint64(bpf.Uptime()), Mtu: 1280}
		if err := fx.d.objects.SyPmtu.Put(bpf.ToAddr(fx.addr("b1")), path); err != nil {
			t.Fatal(err)
		}
		p := tcp(dptest.ACK)(fx)
		for size, want := range map[int]string{1280: "sent forwarded", 1281: "sent too_big"} {
			p.Payload = make([]byte, size-60)
			r := fx.run(p.Frame())
			if got := fmt.Sprint(r.did, " ", r.reason); got != want {
				t.Errorf("%s: %d bytes: %s; want %s", h, size, got, want)
			}
			if r.reason == "too_big" && (r.out.Rest != 1280 || binary.BigEndian.Uint16(r.out.Payload[4:]) != 1241) {
				t.Errorf("%s: answered with MTU %d", h, r.out.Rest)
			}
		}
	}
}
