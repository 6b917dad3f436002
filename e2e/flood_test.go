package e2e

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const (
	floodFor  = 15 * time.Second
	floodRate = 200_000 // packets a second
)

// TestFlood: during a SYN flood from random addresses no connection fails and new clients, 50 ms away, are answered.
func TestFlood(t *testing.T) {
	for _, mode := range []string{"xdp", "tc"} {
		t.Run(mode, func(t *testing.T) {
			s := newSite(t, peers.BIRD, mode, 1, 3)
			s.withstandsFlood(t)
		})
	}
}

func (s *site) withstandsFlood(t *testing.T) {
	conns := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 500)
	six := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip6, 9000), 500)
	must.Do(t, s.Delay(s.Clients[0], roundTrip))
	// veth receives frames from XDP only while GRO is on.
	must.Do(t, s.Balancers[0].SoftwareChecksums("eth0"))
	// The router drops replies to the random source addresses.
	for _, net := range []string{"198.18.0.0/15", "2001:db8:bad::/48"} {
		must.Get(s.Topology.Router.Run(t.Context(), "ip", "route", "add", "blackhole", net))(t)
	}
	ctx, cancel := context.WithTimeout(t.Context(), floodFor)
	defer cancel()
	var sent [2]int
	var flood sync.WaitGroup
	for i, vip := range vips {
		flood.Go(func() { sent[i] = s.flood(t, ctx, vip, floodRate/2) })
	}
	var new traffic.Result
	lost := 0
	start := time.Now()
	for ctx.Err() == nil {
		labtest.Exchange(t, conns, "during the flood")
		labtest.Exchange(t, six, "during the flood")
		for _, vip := range vips {
			load := traffic.Load{URL: labtest.URL(vip), Requests: 20, Timeout: 10 * time.Second}
			r := s.Client().Load(t.Context(), load)
			if r.Err() != nil {
				t.Logf("new clients of %s: %v", vip, r.Err())
				lost += len(r.Errors)
			}
			for name, n := range r.Servers {
				if new.Servers == nil {
					new.Servers = map[string]int{}
				}
				new.Servers[name] += n
			}
		}
	}
	flood.Wait()
	took := time.Since(start)
	labtest.Exchange(t, conns, "after the flood")
	labtest.Exchange(t, six, "after the flood")
	out := labtest.Metrics(t, s.Agents[0], "steelyard_datapath_packets_total", "steelyard_datapath_flows")
	perSecond := float64(sent[0]+sent[1]) / took.Seconds()
	t.Logf("%d + %d SYNs in %s: %.0f a second; %d of 1000 connections open, %d requests of new clients answered\n%s",
		sent[0], sent[1], took.Round(time.Second), perSecond, conns.Alive()+six.Alive(), new.Answered(), out)
	// At this rate a source port is reused after a quarter of a second. The generator and all hosts share two CPUs, so
	// a handshake may take longer.
	if lost*1000 > new.Answered() {
		t.Errorf("%d requests of new clients failed, and %d were answered", lost, new.Answered())
	}
	if sent[0]+sent[1] < 250_000 {
		t.Errorf("the flood had only %d packets", sent[0]+sent[1])
	}
}

// flood sends SYNs to a VIP from the router, at most rate a second until ctx ends, and returns how many.
func (s *site) flood(t *testing.T, ctx context.Context, vip netip.Addr, rate int) (sent int) {
	balancer := s.Balancers[0]
	var to net.HardwareAddr
	must.Do(t, balancer.Do(func() error {
		nic, err := net.InterfaceByName("eth0")
		if err == nil {
			to = nic.HardwareAddr
		}
		return err
	}))
	err := s.Topology.Router.Do(func() error {
		nic, err := net.InterfaceByName(balancer.Port)
		if err != nil {
			return err
		}
		frame := synFrom(to, vip)
		spec := &ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: flooder(frame, nic.Index)}
		prog, err := ebpf.NewProgram(spec)
		if err != nil {
			return err
		}
		defer prog.Close()
		const perSecond = 50
		tick := time.NewTicker(time.Second / perSecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
			const liveFrames = 2 // BPF_F_TEST_XDP_LIVE_FRAMES
			n := rate / perSecond
			if _, err := prog.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(n), Flags: liveFrames}); err != nil {
				return err
			}
			sent += n
		}
	})
	if err != nil {
		t.Errorf("flood %s: %v", vip, err)
	}
	return sent
}

// synFrom is a SYN to this MAC address from 198.18.0.0 or 2001:db8:bad::.
func synFrom(to net.HardwareAddr, vip netip.Addr) []byte {
	p := dptest.Packet{
		To: to, Src: netip.MustParseAddrPort("198.18.0.0:0"), Dst: netip.AddrPortFrom(vip, 9000),
		Proto: dptest.TCP, Flags: dptest.SYN, MSS: 1460,
	}
	if vip.Is6() {
		p.Src = netip.MustParseAddrPort("[2001:db8:bad::]:0")
	}
	f := p.Frame()
	return append(f, make([]byte, (4-len(f)%4)%4)...)
}

// flooder is an XDP program that writes each packet with a random source address and port and redirects it to an
// interface. It writes a random word and its complement: their ones' complement sum is 0, so the checksum stays valid
// (RFC 1071).
func flooder(frame []byte, ifindex int) asm.Instructions {
	ins := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.FnGetPrandomU32.Call(),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.LoadMem(asm.R2, asm.R6, 0, asm.Word),
		asm.LoadMem(asm.R3, asm.R6, 4, asm.Word),
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, int32(len(frame))),
		asm.JGT.Reg(asm.R4, asm.R3, "out"),
	}
	for i := 0; i < len(frame); i += 4 {
		word := int64(int32(uint32(frame[i]) | uint32(frame[i+1])<<8 | uint32(frame[i+2])<<16 | uint32(frame[i+3])<<24))
		ins = append(ins, asm.StoreImm(asm.R2, int16(i), word, asm.Word))
	}
	// The offsets of the low half of the source address and of the TCP header.
	low, tcp := int16(14+14), int16(14+20)
	if frame[12] == 0x86 {
		low, tcp = 14+22, 14+40
	}
	half := func(at int16, of asm.Register) asm.Instruction { return asm.StoreMem(asm.R2, at, of, asm.Half) }
	ins = append(ins, asm.Mov.Reg(asm.R8, asm.R7), asm.Xor.Imm(asm.R8, -1)) // the complement
	if frame[12] == 0x08 {
		ins = append(ins, half(14+4, asm.R8)) // for the IPv4 header checksum: the identification
	}
	ins = append(ins, half(low, asm.R7), half(tcp+14, asm.R8)) // address and window
	ins = append(ins, asm.RSh.Imm(asm.R7, 16), asm.RSh.Imm32(asm.R8, 16))
	ins = append(ins, half(tcp, asm.R7), half(tcp+18, asm.R8)) // port and urgent pointer
	return append(ins,
		asm.Mov.Imm(asm.R1, int32(ifindex)), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("out"), asm.Return())
}
