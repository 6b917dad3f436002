package verify

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// Explain returns the programs' decision for the first packet of a flow, and whether the client receives the reply. It
// runs the programs' own code (bpf/explain.h), sends no packets and changes no map.
func (v *Verifier) Explain(q lb.Question) (lb.Explanation, error) {
	e := lb.Explanation{
		Scope: lb.ScopeOutside, Client: q.Client, Address: q.To.Addr(), Port: q.To.Port(), Protocol: q.Protocol,
	}
	x, err := v.ExplainFrame(opening(q))
	if err != nil {
		return e, err
	}
	verdict := x.V
	e.Action, e.Reason = v.Names.Actions[verdict.Action], v.Names.Reasons[verdict.Reason]
	e.Meaning = v.Meaning(e.Reason)
	v.name(&e, verdict)
	e.Steps = v.steps(q, e, x)
	v.explainReply(q, &e, x)
	v.explainFull(q, &e, verdict)
	return e, nil
}

// explainFull adds a fault if the connection cannot be stored when its client completes the handshake. The programs
// notice only then, because they do not know how full the table is.
func (v *Verifier) explainFull(q lb.Question, e *lb.Explanation, verdict bpf.Verdict) {
	const full = "flows_full"
	if q.Protocol == lb.UDP || e.Action != "forward" || v.Names.Commits[verdict.Commit] != "open" ||
		v.Flows.Streams() < v.Objects.SyStreamServers.MaxEntries() {
		return
	}
	fault := full + ": " + v.Meaning(full)
	e.Fault = cmp.Or(e.Fault, fault)
	e.Steps = append(e.Steps, "when the client completes the handshake, it is refused: "+fault)
}

// ExplainFrame runs sy_explain on a frame of at least explainRoom bytes and the size of the result. A mark in the frame
// distinguishes its result from the results of network packets.
func (v *Verifier) ExplainFrame(frame []byte) (x bpf.Explained, err error) {
	run := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame))}
	var result uint32 = bpf.XDPAborted
	for try := 0; err == nil && result == bpf.XDPAborted && try < explainTries; try++ {
		frame[11] = byte(1 + rand.IntN(255))
		result, err = v.Objects.SyExplain.Run(&run)
	}
	switch {
	case err != nil:
		return x, fmt.Errorf("run the programs on a packet: %w", err)
	case result != bpf.XDPPass:
		return x, fmt.Errorf("run the programs on a packet: the result is %d", result)
	}
	if _, err := binary.Decode(run.DataOut, binary.NativeEndian, &x); err != nil {
		return x, fmt.Errorf("read the verdict: %w", err)
	}
	return x, nil
}

// explainTries bounds the runs of a frame that a network packet interrupts.
const explainTries = 20

// explainRoom is the size in bytes of the frame, which the program overwrites with the verdict.
const explainRoom = 512

// opening returns the first frame of a flow. It sets the fields that decisions depend on, but no checksums.
func opening(q lb.Question) []byte {
	l4 := make([]byte, 20)
	binary.BigEndian.PutUint16(l4[0:], q.Client.Port())
	binary.BigEndian.PutUint16(l4[2:], q.To.Port())
	switch q.Protocol {
	case lb.TCP:
		l4[12], l4[13] = 5<<4, 2 // no options, SYN
	case lb.UDP:
		binary.BigEndian.PutUint16(l4[4:], uint16(len(l4)))
	case lb.SCTP:
		l4[12] = 1 // INIT
	}
	frame := make([]byte, 14, explainRoom)
	src, dst := q.Client.Addr().AsSlice(), q.To.Addr().AsSlice()
	if q.To.Addr().Is4() {
		binary.BigEndian.PutUint16(frame[12:], unix.ETH_P_IP)
		frame = append(frame, 0x45, 0, 0, byte(20+len(l4)), 0, 0, 0, 0, 64, byte(q.Protocol), 0, 0)
	} else {
		binary.BigEndian.PutUint16(frame[12:], unix.ETH_P_IPV6)
		frame = append(frame, 0x60, 0, 0, 0, 0, byte(len(l4)), byte(q.Protocol), 64)
	}
	frame = append(append(append(frame, src...), dst...), l4...)
	return frame[:explainRoom]
}

// name adds the names of the ids in a verdict.
func (v *Verifier) name(e *lb.Explanation, verdict bpf.Verdict) {
	if verdict.Counted > 0 {
		_, service, _ := v.Services.Names()
		e.Service = service[verdict.Frontend]
	}
	if e.Action != "forward" {
		return
	}
	e.Forward = table.DecodeMethod(bpf.Method(verdict.Method))
	e.Backend = netip.AddrPortFrom(bpf.FromAddr(verdict.T.Dst), 0)
	if e.Forward == lb.MethodNAT {
		e.Backend = netip.AddrPortFrom(bpf.FromAddr(verdict.T.Dst), bpf.Swap(verdict.T.Dport))
	}
}

// steps describes the decision in the order in which the programs make it.
func (v *Verifier) steps(q lb.Question, e lb.Explanation, x bpf.Explained) (steps []string) {
	verdict := x.V
	say := func(format string, args ...any) { steps = append(steps, fmt.Sprintf(format, args...)) }
	frontend := fmt.Sprintf("%s/%s", q.To, q.Protocol)
	switch {
	case verdict.Counted > 0:
		say("%s is a frontend of %s", frontend, e.Service)
	case e.Reason == "not_ours":
		say("%s is not the address of a service: the packet is passed to the stack", q.To.Addr())
		return steps
	case e.Reason == "no_frontend": // other reasons apply before the frontend lookup
		say("%s is a VIP, but no service has %s", q.To.Addr(), frontend)
	}
	if e.Action == "forward" {
		v.sayFlow(say, verdict)
		v.sayPath(say, e, verdict)
		return steps
	}
	say("%s: %s", e.Action, e.Meaning)
	f, _ := v.Services.Find(q)
	subject, ok := v.Services.Subject(f)
	if ok && e.Reason == "source_is_local" && table.BalancesSockets(subject.Plan) && v.Hooks.BalancesSockets() {
		say("this machine's own connections go to a server without such a packet (local_clients)")
	}
	return steps
}

// isOfKnownFlow reports whether a forwarded packet that could open a flow belongs to a flow with an entry.
func (v *Verifier) isOfKnownFlow(verdict bpf.Verdict) bool {
	if verdict.Method == uint8(bpf.MethodNAT) {
		return v.Names.Commits[verdict.Commit] != "open"
	}
	return slices.Contains([]string{"dsr_confirm", "dsr_touch", "dsr_close"}, v.Names.Commits[verdict.Commit])
}

func (v *Verifier) sayFlow(say func(string, ...any), verdict bpf.Verdict) {
	chained := verdict.Method == uint8(bpf.MethodGUE) &&
		slices.Contains([]string{"none", "relay"}, v.Names.Commits[verdict.Commit])
	switch {
	case chained && verdict.Chain.Passed == 1:
		say("this node delivers it but does not know the flow, so it is passed to nodes that may know it")
	case chained:
		say("its hash selects the node that delivers it; this node stores no flow")
	case v.isOfKnownFlow(verdict):
		say("its flow is known")
	default:
		say("its flow is unknown, so a new one is opened")
	}
	if verdict.Affinity == 1 {
		say("the client keeps its backend (affinity)")
	}
}

func (v *Verifier) sayPath(say func(string, ...any), e lb.Explanation, verdict bpf.Verdict) {
	to := bpf.FromAddr(verdict.T.Dst)
	switch {
	case verdict.Local == 1:
		say("to %s on this node, with the client's address", e.Backend)
		return
	case e.Forward == lb.MethodNAT:
		say("to %s, from %s and a port in snat_ports", e.Backend, bpf.FromAddr(verdict.T.Src))
	case e.Forward == lb.MethodDSR:
		say("to the MAC address of %s, otherwise unchanged", to)
	default:
		how := "ipip"
		if verdict.Method == uint8(bpf.MethodGUE) {
			how = "gue"
		}
		say("to %s through a tunnel (%s) from %s", to, how, bpf.FromAddr(verdict.T.Src))
	}
	var next []string
	for _, a := range verdict.Chain.Next[:min(int(verdict.Chain.N), len(verdict.Chain.Next))] {
		next = append(next, bpf.FromAddr(a).String())
	}
	if len(next) > 0 {
		say("if the flow is unknown there, next to %s", strings.Join(next, ", then "))
	}
	say("%s", route.Describe(to))
}

// explainReply adds the path of the reply to the client, the state of the programs on each interface, and what is
// wrong.
func (v *Verifier) explainReply(q lb.Question, e *lb.Explanation, x bpf.Explained) {
	say := func(format string, args ...any) { e.Steps = append(e.Steps, fmt.Sprintf(format, args...)) }
	v.Mu.Lock()
	defer v.Mu.Unlock()
	v.Look(false)
	e.Reply = v.Names.Reasons[x.Reply]
	switch {
	case e.Action != "forward":
	case e.Reply == "none":
		say("the server answers the client directly; its packets do not pass this node")
	case e.Reply == forwarded:
		say("the reply is recognized and sent to the client by %s", v.view.Name(cmp.Or(x.ReplyVia, x.ReplyIfindex)))
	}
	var broken []string
	for _, s := range v.Hooks.Inspect() {
		if s.Down {
			say("%s is down", s.Name)
		}
		if s.Fault == "" && !s.Down {
			say("on %s the programs are active (%s, %s)", s.Name, s.Mode, s.Hook)
		}
		if s.Fault == "" {
			continue
		}
		say("on %s not all programs are active: %s", s.Name, s.Fault)
		if s.Mode == "" && s.Fault != hook.Absent {
			broken = append(broken, fmt.Sprintf("%s: %s", s.Name, s.Fault))
		}
	}
	f, ok := v.Services.Find(q)
	if !ok {
		return
	}
	if s, ok := v.Services.Subject(f); ok {
		e.Fault = v.faultOf(q, s, x)
	}
	if e.Fault == "" {
		e.Fault = strings.Join(broken, "; ")
	}
	if v.node.confirmed { // it may cause the others: a program that drops packets also drops ARP replies
		e.Fault = v.node.fault
	}
	if e.Fault != "" {
		say("the client gets no answer: %s", e.Fault)
	}
	f.Decap = true
	if _, ok := v.Services.Inbound(f); !ok {
		return
	}
	if fault := v.inboundFault(f); fault != "" {
		say("%s%s", InboundWarning, fault)
	} else {
		say("when another node selects this one, the packet is delivered here")
	}
}
