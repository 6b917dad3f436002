package capture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func at(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

func frame(p dptest.Packet) lb.Frame {
	b := p.Frame()
	return lb.Frame{Length: len(b), Bytes: b}
}

var (
	syn = dptest.Packet{Src: at("192.0.2.7:40000"), Dst: at("203.0.113.10:80"), Proto: dptest.TCP, Flags: dptest.SYN}
	v6  = dptest.Packet{Src: at("[2001:db8::7]:40000"), Dst: at("[2001:db8:1::10]:53"), Proto: dptest.UDP}
)

const synText, v6Text = "192.0.2.7:40000 > 203.0.113.10:80 tcp SYN", "[2001:db8::7]:40000 > [2001:db8:1::10]:53 udp"

var frames = map[string]dptest.Packet{
	synText: syn,
	v6Text:  v6,
	"192.0.2.7:40000 > 203.0.113.10:80 tcp RST ACK": {Src: syn.Src, Dst: syn.Dst, Proto: dptest.TCP,
		Flags: dptest.RST | dptest.ACK},
	"192.0.2.7 > 203.0.113.10 icmp type 8 code 0": {Src: syn.Src, Dst: syn.Dst, Proto: dptest.ICMP, Type: 8},
	"192.0.2.7:40000 > 203.0.113.10:80 sctp":      {Src: syn.Src, Dst: syn.Dst, Proto: dptest.SCTP, Type: 1},
	"192.0.2.1 > 10.0.0.1 ipip (" + synText + ")": {Src: at("192.0.2.1:0"), Dst: at("10.0.0.1:0"),
		Proto: dptest.IPIP, Inner: &syn},
	"192.0.2.1:50000 > 10.0.0.1:6090 udp gue (" + v6Text + ")": {Src: at("192.0.2.1:50000"), Dst: at("10.0.0.1:6090"),
		Proto: dptest.UDP, Payload: dptest.GUE(v6, 1, 2, 3, 4)},
}

func TestDescribe(t *testing.T) {
	for want, p := range frames {
		f := frame(p)
		must.Equal(t, want, Describe(f))
		tagged := append(append(append([]byte{}, f.Bytes[:12]...), 0x81, 0, 0, 7), f.Bytes[12:]...)
		must.Row(t, "tagged", want, Describe(lb.Frame{Bytes: tagged}))
		for n := range f.Bytes { // of any length
			Describe(lb.Frame{Bytes: f.Bytes[:n]})
		}
	}
	must.Equal(t, "ethertype 0x0806", Describe(lb.Frame{Bytes: append(make([]byte, 12), 8, 6)}))
	large := dptest.Packet{Src: syn.Src, Dst: syn.Dst, Proto: dptest.UDP, Payload: make([]byte, 3000)}
	parts := large.Fragments(1, 1480)
	must.Equal(t, "192.0.2.7 > 203.0.113.10 fragment", Describe(lb.Frame{Bytes: parts[1]}))
	large.Src, large.Dst = v6.Src, v6.Dst
	parts = large.Fragments(1, 1440)
	must.Equal(t, v6Text, Describe(lb.Frame{Bytes: parts[0]}))
	must.Equal(t, "2001:db8::7 > 2001:db8:1::10 fragment", Describe(lb.Frame{Bytes: parts[1]}))
}

func packets() (forwarded, dropped lb.TracedPacket) {
	to := syn
	to.Src, to.Dst = at("10.0.0.1:61000"), at("10.0.0.21:8080")
	forwarded = lb.TracedPacket{
		Time: time.Date(2026, 1, 2, 3, 4, 5, 678901234, time.Local), Interface: "eth0", Hook: "xdp", Action: "forward",
		Reason: "forwarded", Meaning: "sent to a backend", Service: "web", Backend: to.Dst, Forward: lb.MethodNAT,
		Egress: "eth1", Before: frame(syn), After: frame(to),
	}
	dropped = lb.TracedPacket{
		Time: forwarded.Time, Interface: "eth0", Hook: "tc", Action: "drop", Reason: "no_backend",
		Meaning: "no backend accepts new flows", Service: "web", Before: frame(syn),
	}
	return forwarded, dropped
}

func TestLine(t *testing.T) {
	forwarded, dropped := packets()
	must.Equal(t, "03:04:05.678901 eth0 xdp: forward: "+synText+" => 10.0.0.1:61000 > 10.0.0.21:8080 tcp SYN on eth1; "+
		"service web, backend 10.0.0.21:8080, nat, request", Line(forwarded))
	must.Equal(t, "03:04:05.678901 eth0 tc: drop: "+synText+"; service web, no_backend: no backend accepts new flows",
		Line(dropped))
	forwarded.Egress, forwarded.Service, forwarded.Backend, forwarded.Forward = "", "", netip.AddrPort{}, ""
	must.Equal(t, "03:04:05.678901 eth0 xdp: forward: "+synText+
		" => 10.0.0.1:61000 > 10.0.0.21:8080 tcp SYN to the stack; forwarded", Line(forwarded))
	reply := syn
	reply.Src, reply.Dst = syn.Dst, syn.Src
	forwarded.After, forwarded.Backend, forwarded.Forward = frame(reply), at("10.0.0.21:8080"), lb.MethodNAT
	forwarded.Reply = true
	must.True(t, strings.HasSuffix(Line(forwarded), "backend 10.0.0.21:8080, nat, reply"), "%s", Line(forwarded))
	forwarded.Forward, forwarded.Reply = lb.MethodDSR, false
	must.True(t, strings.HasSuffix(Line(forwarded), "backend 10.0.0.21:8080, dsr, request"), "%s", Line(forwarded))
}

// Each block has its length at both ends, and is a multiple of four bytes. e2e reads a file with tcpdump.
func TestFile(t *testing.T) {
	var out bytes.Buffer
	f := must.Get(NewFile(&out))(t)
	forwarded, dropped := packets()
	must.Do(t, f.Write(forwarded))
	must.Do(t, f.Write(dropped))
	var got []string
	for b := out.Bytes(); len(b) > 0; {
		kind, size := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
		must.Need(t, size%4 == 0 && int(size) <= len(b) && binary.LittleEndian.Uint32(b[size-4:]) == size,
			"a block of %d bytes of %d", size, len(b))
		body := b[8 : size-4]
		switch kind {
		case blockSection, blockInterface:
			got = append(got, fmt.Sprint("block ", kind))
		case blockPacket:
			n := binary.LittleEndian.Uint32(body[12:])
			nanos := uint64(binary.LittleEndian.Uint32(body[4:]))<<32 | uint64(binary.LittleEndian.Uint32(body[8:]))
			must.Equal(t, uint64(forwarded.Time.UnixNano()), nanos)
			options := body[20+(n+3)/4*4:]
			comment := options[4 : 4+binary.LittleEndian.Uint16(options[2:])]
			got = append(got, fmt.Sprintf("interface %d, %s: %s", binary.LittleEndian.Uint32(body),
				Describe(lb.Frame{Bytes: body[20 : 20+n]}), comment))
		}
		b = b[size:]
	}
	must.Equal(t, []string{
		"block 168627466", "block 1",
		"interface 0, " + synText + ": before, eth0 xdp: forward, service web, backend 10.0.0.21:8080, nat, " +
			"request",
		"block 1", "interface 1, 10.0.0.1:61000 > 10.0.0.21:8080 tcp SYN: after, eth1",
		"interface 0, " + synText + ": before, eth0 tc: drop, service web, no_backend: no backend accepts new flows",
	}, got)
}
