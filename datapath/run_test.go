package datapath

import (
	"encoding/binary"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

type result struct {
	did    string // sent, dropped or passed
	reason string
	frame  []byte
	out    dptest.Packet // decoded frame, if it was sent or decapsulated and is not a fragment
}

// run runs a frame through explain and through the hook, and checks that they agree. It runs packets that XDP passes
// through tc.
func (fx *fixture) run(frame []byte) result {
	fx.t.Helper()
	r := result{reason: fx.explain(frame), frame: frame}
	before := fx.counts()
	r.did, r.frame = fx.through(frame)
	// The final reason is counted; sending may fail for a reason that explain does not return.
	for v, n := range fx.counts() {
		if n > before[v] {
			r.reason = v.Reason
		}
	}
	delivered := r.reason == "decapsulated" || r.did == "passed" && r.reason == "forwarded"
	if r.did == "passed" && !delivered && string(r.frame) != string(frame) {
		fx.t.Fatalf("a packet was passed on changed:\n%x\n%x", frame, r.frame)
	}
	if (r.did == "sent" || delivered) && !isFragment(r.frame) {
		var err error
		r.out, err = dptest.ParseWhole(r.frame)
		must.Need(fx.t, err == nil, "what was sent: %v\n%x", err, r.frame)
		fromHere := r.out.Src.Addr() == fx.addr("self") && r.out.Src.Port() != 0
		if r.reason == "forwarded" && fromHere && r.out.Inner == nil {
			fx.last = r.out
		}
	}
	return r
}

// through runs a frame through the hook, and through tc if XDP passes it.
func (fx *fixture) through(frame []byte) (did string, out []byte) {
	fx.t.Helper()
	if did, out = fx.first(frame); fx.hook == hookXDP && did == "passed" {
		return fx.runTC(out)
	}
	return did, out
}

// first runs a frame through the hook only.
func (fx *fixture) first(frame []byte) (did string, out []byte) {
	fx.t.Helper()
	if fx.hook == hookXDP {
		return fx.runXDP(frame)
	}
	return fx.runTC(frame)
}

// payload returns n bytes that differ.
func payload(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func isFragment(f []byte) bool {
	if binary.BigEndian.Uint16(f[12:]) == 0x0800 {
		return binary.BigEndian.Uint16(f[20:])&0x3fff != 0
	}
	return binary.BigEndian.Uint16(f[12:]) == 0x86dd && f[20] == 44
}

func (fx *fixture) active() hook.Programs {
	if fx.programs != nil {
		return *fx.programs
	}
	return hook.Plain(fx.d.objects)
}

func (fx *fixture) runXDP(frame []byte) (did string, out []byte) {
	fx.t.Helper()
	return fx.runProgram(fx.active().XDP, frame, fx.xdp(frame), hookXDP.verdicts())
}

func (fx *fixture) runTC(frame []byte) (did string, out []byte) {
	fx.t.Helper()
	return fx.runProgram(fx.active().In, frame, fx.skb(0), hookTC.verdicts())
}

type xdpMd struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }

// xdp returns the context of a frame on the uplink.
func (fx *fixture) xdp(frame []byte) xdpMd {
	return xdpMd{DataEnd: uint32(len(frame)), Ingress: fx.nic}
}

// verdicts returns the possible results of a hook's programs.
func (h hookName) verdicts() map[uint32]string {
	if h == hookXDP {
		return map[uint32]string{1: "dropped", 2: "passed", 3: "sent", 4: "sent"}
	}
	return map[uint32]string{2: "dropped", 0xffffffff: "passed", 7: "sent"}
}

// skb returns the context of a packet on the uplink: struct __sk_buff, whose third word is mark and whose eleventh is
// ifindex.
func (fx *fixture) skb(mark uint32) []byte {
	skb := make([]byte, 192)
	binary.NativeEndian.PutUint32(skb[8:], mark)
	binary.NativeEndian.PutUint32(skb[40:], fx.nic)
	return skb
}

func (fx *fixture) runProgram(
	prog *ebpf.Program, frame []byte, context any, verdicts map[uint32]string,
) (did string, out []byte) {
	fx.t.Helper()
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: context}
	var ret uint32
	fx.do(func() (err error) {
		ret, err = prog.Run(&opts)
		return err
	})
	did = verdicts[ret]
	must.Need(fx.t, did != "", "the program returned %d", ret)
	return did, opts.DataOut
}

func (fx *fixture) counts() map[Verdict]uint64 {
	fx.t.Helper()
	return must.Get(fx.d.Stats())(fx.t).Packets
}

// explain returns the reason from sy_explain.
func (fx *fixture) explain(frame []byte) string {
	fx.t.Helper()
	return fx.d.names.Reasons[fx.explained(frame).V.Reason]
}

// explained returns the result of sy_explain for a frame.
func (fx *fixture) explained(frame []byte) (e bpf.Explained) {
	fx.t.Helper()
	padded := append(frame[:len(frame):len(frame)], make([]byte, 256)...) // space for the result
	fx.do(func() (err error) {
		e, err = fx.d.verifier.ExplainFrame(padded)
		return err
	})
	return e
}

// wantDid runs a packet and checks what happened to it.
func (fx *fixture) wantDid(when string, p dptest.Packet, did string) {
	fx.t.Helper()
	r := fx.run(p.Frame())
	must.True(fx.t, r.did == did, "%s: %s: %s; want %s", when, r.did, r.reason, did)
}

// wantReason runs a packet and checks its reason.
func (fx *fixture) wantReason(when string, p dptest.Packet, reason string) {
	fx.t.Helper()
	r := fx.run(p.Frame())
	must.True(fx.t, r.reason == reason, "%s: %s: %s; want %s", when, r.did, r.reason, reason)
}
