package datapath

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Nothing on this node but our programs sends packets to the tunnel port: at another node they would have the address
// of this one.
func TestSpoofedTunnelPacketsDoNotLeave(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		for _, ends := range []bool{true, false} {
			fx := shared(t, hookTC, v6, func(o *Options) { o.Delivers = ends })
			p := dptest.Packet{Src: fx.at("self", 40000), Dst: fx.at("b2", 6090), Proto: dptest.UDP,
				Payload: dptest.GUE(fx.fromClient(dptest.TCP, dptest.SYN), fx.withToken("unknown")...)}
			want, other := map[bool]string{true: "dropped", false: "passed"}[ends], p
			other.Dst = fx.at("b2", 6091)
			for _, tt := range []struct {
				when string
				p    dptest.Packet
				mark uint32
				want string
			}{
				{"of this node", p, 0, want},
				{"with another mark", p, 7, want},
				{"of our programs", p, 0x53580000, "passed"},
				{"to another port", other, 0, "passed"},
			} {
				before := fx.counts()
				did, _ := fx.runOut(tt.p.Frame(), tt.mark)
				counted := fx.counts()[Verdict{Action: "drop", Reason: "tunnel_spoofed"}]
				counted -= before[Verdict{Action: "drop", Reason: "tunnel_spoofed"}]
				if did != tt.want || counted != uint64(bpf.Truth(did == "dropped")) {
					t.Errorf("tunnels end here: %t: %s: %s, counted %d; want %s", ends, tt.when, did, counted, tt.want)
				}
			}
		}
	}
}

// The socket of a pod may make a packet whose headers are longer than what the kernel has in one piece.
func TestSpoofedTunnelPacketsInPiecesDoNotLeave(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, true, func(o *Options) { o.Delivers = true })
	udp := dptest.Packet{Src: fx.at("self", 40000), Dst: fx.at("b2", 6090), Proto: dptest.UDP,
		Payload: dptest.GUE(fx.fromClient(dptest.TCP, dptest.SYN))}.Frame()[14+40:]
	for _, size := range []int{8, 248, 256, 400} {
		options := []byte{unix.IPPROTO_UDP, byte(size/8 - 1)}
		for rest := size - len(options); rest > 0; { // of padding (RFC 8200, 4.2)
			n := min(rest, 255)
			options = append(append(options, 1, byte(n-2)), make([]byte, n-2)...)
			if rest -= n; rest == 1 {
				options, rest = append(options, 0), 0
			}
		}
		before := fx.counts()
		fx.do(func() error {
			return sendPieces(fx.addr("b2"), unix.IPPROTO_DSTOPTS, options[:8], append(options[8:], udp...))
		})
		after := fx.counts()
		v := Verdict{Action: "drop", Reason: "tunnel_spoofed"}
		if after[v] != before[v]+1 {
			t.Errorf("options of %d bytes: %d were dropped; want 1", size, after[v]-before[v])
		}
	}
}

// sendPieces sends one packet of an IPv6 protocol in two calls.
func sendPieces(to netip.Addr, proto int, first, rest []byte) error {
	socket, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	if err := unix.Connect(socket, &unix.SockaddrInet6{Addr: to.As16()}); err != nil {
		return err
	}
	if err := unix.Send(socket, first, unix.MSG_MORE); err != nil {
		return err
	}
	if err := unix.Send(socket, rest, 0); err != unix.ENOBUFS { // the packet is dropped here
		return err
	}
	return nil
}
