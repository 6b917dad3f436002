package bgp_test

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/osrg/gobgp/v3/pkg/server"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// attackedGoBGP makes the test binary run a plain gobgp that listens on this port.
const attackedGoBGP = "STEELYARD_BGP_TEST_GOBGP"

// update returns an UPDATE with these path attributes and routes, in hexadecimal.
func update(attributes, routes string) []byte {
	decode := func(s string) []byte {
		b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
		if err != nil {
			panic(err)
		}
		return b
	}
	a, r := decode(attributes), decode(routes)
	n := 23 + len(a) + len(r)
	return slices.Concat([]byte(strings.Repeat("\xff", 16)), []byte{byte(n >> 8), byte(n), 2, 0, 0},
		[]byte{byte(len(a) >> 8), byte(len(a))}, a, r)
}

// attacks are UPDATEs that crash gobgp v3.37.0, or are published as attacks on its releases.
var attacks = map[string]struct {
	message []byte
	crashes bool // gobgp v3.37.0 as the speaker configures it, with this or a similar message
}{
	// A NEXT_HOP shorter than four bytes.
	"CVE-2026-30405": {update("40 01 01 00 40 02 00 40 03 02 7f00", "18 cb0071"), false},
	// A Prefix-SID whose SRv6 L3 service is too short.
	"CVE-2026-7734": {update("40 01 01 00 40 02 00 40 03 04 7f000001 c0 28 04 05 00 01 00", "18 cb0071"), false},
	// An AIGP attribute that is too short.
	"CVE-2026-7735": {update("40 01 01 00 40 02 00 40 03 04 7f000001 80 1a 02 01 00", "18 cb0071"), false},
	// AS4_PATH before AS_PATH as the last attribute: index out of range.
	"CVE-2026-41643": {update("40 01 01 00 40 03 04 7f000001 c0 11 06 0201 0000fbf4 40 02 06 0201 0000fbf4", ""), true},
	// The message published for this attack: an AS4_PATH of one byte.
	"CVE-2026-41643 as published": {update("40 11 01 02 40 02 04 ffffdead", ""), false},
	// An unknown attribute marked as well-known.
	"CVE-2026-41642": {update("40 01 01 00 40 02 00 40 03 04 7f000001 40 c8 01 00", "18 cb0071"), false},
	// Attributes with contradictory lengths.
	"CVE-2026-42285": {update("40 01 02 00 00 40 02 00 40 03 04 7f000001", "18 cb0071"), false},
	// An IPv6 extended community that is too short.
	"CVE-2026-37461": {update("40 01 01 00 40 02 00 40 03 04 7f000001 c0 19 05 00 02 20 01 0d", "18 cb0071"), false},
	// An attribute length beyond the end of the message.
	"CVE-2026-37462": {slices.Concat(update("40 01 01 00", "")[:21], []byte{0xff, 0xff, 0x40, 1, 1, 0}), false},
}

func runAttacked(port string) error {
	s := server.NewBgpServer(server.LoggerOption(quiet{}))
	go s.Serve()
	var n int32
	if _, err := fmt.Sscan(port, &n); err != nil {
		return err
	}
	ctx := context.Background()
	err := s.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
		Asn: 64512, RouterId: "192.0.2.11", ListenPort: n, ListenAddresses: []string{"127.0.0.1"},
	}})
	if err != nil {
		return err
	}
	err = s.AddPeer(ctx, &api.AddPeerRequest{Peer: &api.Peer{
		Conf: &api.PeerConf{NeighborAddress: "127.0.0.1", PeerAsn: 64500}, Transport: &api.Transport{PassiveMode: true},
	}})
	if err != nil {
		return err
	}
	for active := false; !active; time.Sleep(time.Millisecond) {
		err = s.ListPeer(ctx, &api.ListPeerRequest{}, func(p *api.Peer) {
			active = p.State.SessionState == api.PeerState_ACTIVE
		})
		if err != nil {
			return err
		}
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// attacker establishes a session as a router. The test then sends arbitrary messages.
func attacker(t *testing.T, c net.Conn) net.Conn {
	t.Helper()
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(timeout))
	caps := []packet.ParameterCapabilityInterface{
		packet.NewCapMultiProtocol(packet.RF_IPv4_UC), packet.NewCapMultiProtocol(packet.RF_IPv6_UC),
		packet.NewCapFourOctetASNumber(64500),
	}
	open := must.Get(packet.NewBGPOpenMessage(64500, 90, "192.0.2.1",
		[]packet.OptionParameterInterface{packet.NewOptionParameterCapability(caps)}).Serialize())(t)
	keepalive := must.Get(packet.NewBGPKeepAliveMessage().Serialize())(t)
	must.Get(c.Write(slices.Concat(open, keepalive)))(t)
	for seen := byte(0); seen != packet.BGP_MSG_KEEPALIVE; {
		seen = readType(t, c)
	}
	return c
}

func readType(t *testing.T, c net.Conn) byte {
	t.Helper()
	head := make([]byte, packet.BGP_HEADER_LENGTH)
	must.Get(io.ReadFull(c, head))(t)
	n := int64(head[16])<<8 + int64(head[17]) - packet.BGP_HEADER_LENGTH
	must.Get(io.CopyN(io.Discard, c, n))(t)
	return head[18]
}

// Published attacks on gobgp do not reach it: the session stays, and the speaker's routes are sent. Without the guard,
// the same messages crash gobgp.
func TestPublishedAttacks(t *testing.T) {
	for name, attack := range attacks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(t)
			defer l.Close()
			at := l.Addr().(*net.TCPAddr).AddrPort()
			o := (&router{port: at.Port()}).options()
			o.Peers[0].HoldTime = 90 * time.Second
			s := newSpeaker(t, o)
			must.Run(t, s.Run)
			must.Do(t, s.Set(t.Context(), announcements(vip4)))
			tcp := must.Get(l.Accept())(t)
			c := attacker(t, tcp)
			messages := around(attack.message)
			written := make(chan error, 1)
			go func() { _, err := c.Write(slices.Concat(messages...)); written <- err }()
			for readType(t, c) != packet.BGP_MSG_UPDATE { // wait for vip4
			}
			must.Do(t, <-written)
			must.Do(t, s.Set(t.Context(), announcements(vip4, netip.MustParseAddr("203.0.113.11"))))
			for readType(t, c) != packet.BGP_MSG_UPDATE {
			}
			p := s.Peers()[0]
			must.True(t, p.State == "established" && p.LastError == "", "peer %+v", p)
			must.Row(t, "gobgp without the guard has ended", attack.crashes, crashes(t, messages))
		})
	}
}

// around returns an UPDATE and 1,000 variants that differ in up to three bytes after the header.
func around(message []byte) [][]byte {
	list, random := [][]byte{message}, rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		b := slices.Clone(message)
		for range 1 + random.IntN(3) {
			b[packet.BGP_HEADER_LENGTH+random.IntN(len(b)-packet.BGP_HEADER_LENGTH)] = byte(random.Uint32())
		}
		list = append(list, b)
	}
	return list
}

// crashes sends messages to a plain gobgp, and reports whether it crashes. gobgp may end the session before it has read
// all of them.
func crashes(t *testing.T, messages [][]byte) bool {
	t.Helper()
	l := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(t)
	at := l.Addr().String()
	l.Close()
	binary := must.Get(os.Executable())(t)
	cmd := exec.Command(binary)
	_, port, _ := net.SplitHostPort(at)
	cmd.Env = append(os.Environ(), attackedGoBGP+"="+port)
	stdin := must.Get(cmd.StdinPipe())(t)
	defer stdin.Close()
	var out strings.Builder
	cmd.Stderr = &out
	stdout := must.Get(cmd.StdoutPipe())(t)
	must.Do(t, cmd.Start())
	_, err := stdout.Read(make([]byte, 5))
	must.Need(t, err == nil, "gobgp does not start: %v", err)
	c := must.Get(net.Dial("tcp4", at))(t)
	c = attacker(t, c)
	cease := must.Get(packet.NewBGPNotificationMessage(packet.BGP_ERROR_CEASE, 0, nil).Serialize())(t)
	_, _ = c.Write(slices.Concat(append(messages, cease)...))
	_, _ = io.Copy(io.Discard, c) // until gobgp closes the connection
	stdin.Close()
	return cmd.Wait() != nil && strings.Contains(out.String(), "panic")
}

// A router that sends 400,000 routes uses up no memory here, and is reported.
func TestFullTable(t *testing.T) {
	const routes, perUpdate = 400_000, 1000
	l := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(t)
	defer l.Close()
	o := (&router{port: l.Addr().(*net.TCPAddr).AddrPort().Port()}).options()
	o.Peers[0].HoldTime, o.Peers[0].MaxReceived = 90*time.Second, 1000
	s := newSpeaker(t, o)
	must.Run(t, s.Run)
	must.Do(t, s.Set(t.Context(), announcements(vip4)))
	tcp := must.Get(l.Accept())(t)
	c := attacker(t, tcp)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for n := 0; n < routes; n += perUpdate {
		nlri := make([]byte, 0, 4*perUpdate)
		for i := range perUpdate {
			nlri = append(nlri, 24)
			nlri = append(nlri, binary.BigEndian.AppendUint32(nil, uint32(n+i)<<8)[:3]...)
		}
		for len(nlri) > 0 {
			part := nlri[:min(len(nlri), 4000)]
			nlri = nlri[len(part):]
			m := update("40 01 01 00 40 02 06 0201 0000fbf4 40 03 04 7f000001", fmt.Sprintf("%x", part))
			must.Get(c.Write(m))(t)
		}
	}
	labtest.Until(t, "all are counted and reported", func() error {
		p := s.Peers()[0]
		if p.Received != routes || !strings.Contains(p.LastError, "more than max_received = 1000 routes") {
			return fmt.Errorf("peer %+v", p)
		}
		return nil
	})
	grown := int64(heap()) - int64(before)
	must.True(t, grown <= 8<<20, "the heap has grown by %d bytes", grown)
	must.Row(t, "the state", "established", s.Peers()[0].State)
}
