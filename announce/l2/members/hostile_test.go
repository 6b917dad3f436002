package members

import (
	"bytes"
	"compress/lzw"
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// object encodes alternating keys and values as a MessagePack map. A number takes nine bytes.
func object(kv ...any) []byte {
	b := []byte{0x80 | byte(len(kv)/2)}
	for _, x := range kv {
		switch x := x.(type) {
		case int:
			b = binary.BigEndian.AppendUint64(append(b, 0xd3), uint64(x))
		case bool:
			b = append(b, map[bool]byte{false: 0xc2, true: 0xc3}[x])
		case string:
			b = append(append(b, 0xd9, byte(len(x))), x...)
			if len(x) < 32 {
				b = append(append(b[:len(b)-len(x)-2], 0xa0|byte(len(x))), x...)
			}
		case []byte:
			b = append(binary.BigEndian.AppendUint16(append(b, 0xda), uint16(len(x))), x...)
		}
	}
	return b
}

// header returns the header of a push/pull message.
func header(nodes, size int) []byte {
	return append([]byte{msgPushPull}, object("Nodes", nodes, "UserStateLen", size, "Join", true)...)
}

// stateOf is a member's report about a node.
func stateOf(a netip.Addr) []byte {
	return object("Name", a.String(), "Addr", a.AsSlice(), "Port", 7946, "Meta", []byte(`{"n":"x"}`), "Incarnation", 1,
		"State", 0, "Vsn", []byte{1, 5, 2, 0, 0, 0})
}

// inflated returns a message of 60 kB that memberlist inflates to 80 MB.
func inflated() []byte {
	var b bytes.Buffer
	w := lzw.NewWriter(&b, lzw.LSB, 8)
	w.Write(bytes.Repeat([]byte{msgUser}, 80<<20))
	w.Close()
	return append([]byte{msgCompress}, object("Algo", 0, "Buf", b.Bytes()[:min(b.Len(), 60<<10)])...)
}

// nonsense returns messages that only a member can seal.
func nonsense() [][]byte {
	deep := append(append([]byte{msgPing, 0x81, 0xa1, 'x'}, bytes.Repeat([]byte{0x91}, 50<<10)...), 0)
	nested := []byte{msgPing}
	for range 1000 {
		nested = append([]byte{msgCompound, 1, byte(len(nested) >> 8), byte(len(nested))}, nested...)
	}
	whole := report{member: node(3), epoch: 1<<64 - 1, claims: map[netip.Addr]entry{vip: {}}}.append([]byte{msgUser})
	return [][]byte{
		whole, {}, {msgPing}, {msgUser}, {msgCompress}, {msgEncrypt}, {msgChecksum, 0, 0, 0, 0}, {msgCompound, 255},
		append([]byte{msgUser}, object("UserMsgLen", 1<<60)...),
		append([]byte{msgUser}, object("UserMsgLen", 20<<20)...),
		header(-1, 0), header(1<<20, 0), header(1<<60, 0), header(0, -1), header(0, 1<<60), header(0, 20<<20),
		inflated(), nested, deep,
		slices.Concat(header(1, 0), object("Name", "127.0.5.3", "Addr", []byte{1}, "Vsn", []byte{9})),
		slices.Concat([]byte{msgIndirectPing}, object("SeqNo", 1, "Target", []byte{1, 2, 3}, "Port", 53, "Node", "x")),
		slices.Concat([]byte{msgPing}, object("SeqNo", 1, "SourceAddr", []byte("example.org"), "SourcePort", 53)),
	}
}

// sealedWith encrypts text like memberlist's version 0, without padding.
func sealedWith(t testing.TB, key, text, with []byte, version byte) []byte {
	sum := sha256.Sum256(append([]byte("steelyard members\x00"), key...))
	block := must.Get(aes.NewCipher(sum[:]))(t)
	gcm := must.Get(cipher.NewGCM(block))(t)
	nonce := make([]byte, 12)
	return append(append([]byte{version}, nonce...), gcm.Seal(nil, nonce, text, with)...)
}

// streamTo connects to a member from a node's address.
func streamTo(t testing.TB, from, to netip.Addr, port uint16) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}, Timeout: 5 * time.Second}
	c, err := d.Dial("tcp", netip.AddrPortFrom(to, port).String())
	if err != nil && !errors.Is(err, unix.ECONNRESET) {
		t.Fatal(err)
	}
	return c
}

// ended waits until the other side has closed a connection.
func ended(t testing.TB, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, err := io.Copy(io.Discard, c)
	must.Need(t, !errors.Is(err, os.ErrDeadlineExceeded), "the connection is still open")
}

// Nonsense from a member that has the key does not crash other members: lengths of 2^60 bytes or below zero, and
// messages that inflate, are nested or empty, or lack the padding of their version.
func TestNonsenseOfAMember(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 3, "key")
	start(t, port, 3, 3, "key")
	until(t, "a member", func() bool { return slices.Equal(alive(a), []string{"lb3"}) })
	packets := must.Get(net.ListenUDP("udp", &net.UDPAddr{IP: node(2).AsSlice()}))(t)
	defer packets.Close()
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(node(1), port))
	messages, before := nonsense(), allocated()
	for _, text := range messages {
		for _, version := range []byte{0, 1} {
			p := sealedWith(t, []byte("key"), text, []byte("steelyard"), version)
			p = append([]byte("\xf4\x09steelyard"), p...)
			if len(p) < 65000 {
				must.Get(packets.WriteTo(p, to))(t)
			}
			h := binary.BigEndian.AppendUint32([]byte{10}, uint32(len(text)+29))
			p = append([]byte("\xf4\x09steelyard"), h...)
			p = append(p, sealedWith(t, []byte("key"), text, append(h, "steelyard"...), version)...)
			c := streamTo(t, node(2), node(1), port)
			c.Write(p)
			ended(t, c)
			c.Close()
		}
	}
	used := allocated() - before
	must.True(t, used <= 16<<20, "%d MiB were allocated for them", used>>20)
	claim := Claim{Eligible: true, Term: 9}
	a.Publish(map[netip.Addr]Claim{vip: claim})
	must.Row(t, "members", []string{"lb3"}, alive(a))
}

// A false report that a member is dead does not last, even with the highest incarnation, because the member can follow
// with a higher one.
func TestHighestIncarnation(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 3, "key")
	start(t, port, 3, 3, "key")
	member := func() bool { return slices.Equal(alive(a), []string{"lb3"}) }
	until(t, "a member", member)
	packets := must.Get(net.ListenUDP("udp", &net.UDPAddr{IP: node(2).AsSlice()}))(t)
	defer packets.Close()
	tell := func(incarnation uint64) {
		dead := object("Incarnation", int(incarnation), "Node", node(3).String(), "From", "x")
		text := append([]byte{msgDead}, dead...)
		p := append([]byte(label), sealedWith(t, []byte("key"), text, []byte(labelText), 1)...)
		must.Get(packets.WriteTo(p, net.UDPAddrFromAddrPort(netip.AddrPortFrom(node(1), port))))(t)
	}
	tell(1<<32 - 1)
	tell(epochMax() / uint64(time.Second))
	until(t, "the report is believed", func() bool { return !member() })
	until(t, "the member is alive again", member)
}

// A member that claims other versions, and reports a wrong port or address of a peer that is about to start, does not
// keep that peer from joining.
func TestFalseVersionsAndPorts(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 3, "key")
	packets := must.Get(net.ListenUDP("udp", &net.UDPAddr{IP: node(2).AsSlice()}))(t)
	defer packets.Close()
	tell := func(n netip.Addr, addr []byte, port int, version byte) {
		text := append([]byte{msgAlive}, object("Incarnation", 1, "Node", n.String(), "Addr", addr, "Port", port,
			"Meta", []byte(`{"n":"x"}`), "Vsn", []byte{version, 5, version, 0, 0, 0})...)
		p := append([]byte(label), sealedWith(t, []byte("key"), text, []byte(labelText), 1)...)
		must.Get(packets.WriteTo(p, net.UDPAddrFromAddrPort(netip.AddrPortFrom(node(1), a.o.Port))))(t)
	}
	long := node(3).As16()
	lie := func() {
		tell(node(2), node(2).AsSlice(), int(port), 5)
		tell(node(3), long[:], int(port), 2)
		tell(node(3), node(3).AsSlice(), 1, 2)
	}
	until(t, "the member listens", func() bool { return listens(node(1), port) })
	lie()
	start(t, port, 3, 3, "key")
	until(t, "the new member", func() bool { lie(); return slices.Contains(alive(a), "lb3") })
}

// False reports about a member fill neither its queue nor the state that members exchange.
func TestFalseReportsAreBounded(t *testing.T) {
	m := New(Options{Name: "lb1", Address: node(1), Port: 7946, Log: slog.New(slog.DiscardHandler)})
	m.Publish(map[netip.Addr]Claim{vip: {Eligible: true}})
	for i := range uint64(2 * queueMax) {
		m.table.merge(report{member: node(1), epoch: m.table.own.epoch + i})
	}
	must.Row(t, "waiting messages", queueMax, m.queue.NumQueued())
	many, peers := map[netip.Addr]entry{}, []netip.Addr{}
	for i, a := 0, vip; i < claimsMax; i, a = i+1, a.Next() {
		many[a] = entry{}
	}
	for i := range 20 {
		peers = append(peers, node(2+i))
	}
	m.SetPeers(peers)
	for _, p := range m.table.peers {
		p.state = state{epoch: 1, claims: many}
	}
	size := len(m.table.whole())
	must.True(t, size <= streamMax, "the state has %d bytes, and members read %d", size, streamMax)
}

// allocated returns the total number of bytes allocated so far.
func allocated() uint64 {
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.TotalAlloc
}

// Connections from hosts that are not members are closed immediately. From a member's address, but without the key, few
// are served at a time, and no more is stored than a member may need.
func TestConnectionsWithoutTheKey(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 2, "key")
	until(t, "the member listens", func() bool { return listens(node(1), port) })
	for _, tt := range []struct {
		from       netip.Addr
		size, sent int
		stored     uint64 // bytes, at most
	}{
		{node(9), 1 << 20, 1 << 16, 1 << 20},
		{node(2), 20 << 20, 1 << 16, 1 << 20}, // refused because of its size
		{node(2), 1 << 20, 1<<20 - 1, streamsMax * 10 << 20},
	} {
		t.Run(fmt.Sprintf("%d bytes from %s", tt.size, tt.from), func(t *testing.T) {
			b := binary.BigEndian.AppendUint32([]byte("\xf4\x09steelyard\x0a"), uint32(tt.size))
			b = append(b, make([]byte, tt.sent)...)
			before := allocated()
			var all []net.Conn
			for range 60 {
				if c := streamTo(t, tt.from, node(1), port); c != nil {
					defer c.Close()
					all = append(all, c)
				}
			}
			for _, c := range all {
				go c.Write(b)
			}
			for _, c := range all {
				ended(t, c)
			}
			stored := allocated() - before
			must.True(t, stored <= tt.stored, "%d KiB were allocated for 60 connections", stored>>10)
		})
	}
	must.True(t, len(alive(a)) == 0, "members %v", alive(a))
}

// The kernel drops datagrams from hosts that are not members, so a flood displaces no member's datagrams, even after
// the members have changed.
func TestStrangersAreDropped(t *testing.T) {
	port := freePort(t)
	a, _ := start(t, port, 1, 2, "key")
	start(t, port, 2, 2, "key")
	until(t, "a member", func() bool { return slices.Equal(alive(a), []string{"lb2"}) })
	a.mu.Lock()
	raw, err := a.network.udp.SyscallConn()
	a.mu.Unlock()
	must.Do(t, err)
	dropped := func() (n uint32) {
		var info [unix.SK_MEMINFO_DROPS + 1]uint32
		size := uint32(unsafe.Sizeof(info))
		must.Do(t, raw.Control(func(fd uintptr) {
			unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_MEMINFO, uintptr(unsafe.Pointer(&info)),
				uintptr(unsafe.Pointer(&size)), 0)
		}))
		return info[unix.SK_MEMINFO_DROPS]
	}
	send := func(from netip.Addr) {
		t.Helper()
		c := must.Get(net.ListenUDP("udp", &net.UDPAddr{IP: from.AsSlice()}))(t)
		defer c.Close()
		to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(node(1), port))
		for range 100 {
			must.Get(c.WriteTo([]byte("x"), to))(t)
		}
	}
	send(node(3))
	until(t, "dropped datagrams", func() bool { return dropped() == 100 })
	a.SetPeers([]netip.Addr{node(2), node(3)})
	send(node(3))
	send(node(4))
	until(t, "dropped datagrams of another host", func() bool { return dropped() == 200 })
	must.Row(t, "members", []string{"lb2"}, alive(a))
}

// listens reports whether a port accepts connections.
func listens(a netip.Addr, port uint16) bool {
	c, err := net.DialTimeout("tcp", netip.AddrPortFrom(a, port).String(), time.Second)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// network is an in-memory memberlist.Transport.
type network struct {
	packets chan *memberlist.Packet
	streams chan net.Conn
}

func (n network) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return node(1).AsSlice(), 7946, nil
}
func (n network) WriteTo([]byte, string) (time.Time, error)           { return time.Now(), nil }
func (n network) PacketCh() <-chan *memberlist.Packet                 { return n.packets }
func (n network) StreamCh() <-chan net.Conn                           { return n.streams }
func (n network) Shutdown() error                                     { return nil }
func (n network) DialTimeout(string, time.Duration) (net.Conn, error) { return nil, net.ErrClosed }

// text is a connection with one received message.
type text struct {
	net.Conn
	*bytes.Reader
	closed chan struct{}
}

func (c text) Read(b []byte) (int, error)  { return c.Reader.Read(b) }
func (c text) Write(b []byte) (int, error) { return len(b), nil }
func (c text) SetDeadline(time.Time) error { return nil }
func (c text) RemoteAddr() net.Addr        { return &net.TCPAddr{} }
func (c text) Close() error                { close(c.closed); return nil }

// FuzzMessages checks that memberlist survives every message that passes the checks, and the delegate everything that
// memberlist passes to it.
func FuzzMessages(f *testing.F) {
	for _, text := range nonsense() {
		f.Add(text, true)
		f.Add(text, false)
	}
	whole := report{member: node(2), epoch: 1, claims: map[netip.Addr]entry{vip: {}}}.append(nil)
	f.Add(slices.Concat(header(2, len(whole)), stateOf(node(1)), stateOf(node(2)), whole), true)
	f.Add(append([]byte{msgAlive}, object("Incarnation", 3, "Node", node(2).String(), "Addr", node(2).AsSlice(),
		"Port", 1, "Meta", []byte(`{"n":"x","m":["02:00:00:00:00:01"]}`), "Vsn", []byte{1, 5, 2, 0, 0, 0})...), false)
	f.Add(append([]byte{msgSuspect}, object("Incarnation", 3, "Node", node(1).String(), "From", "x")...), false)
	f.Add(append([]byte{msgUser}, whole...), false)
	m := New(Options{Name: "lb1", Address: node(1), Port: 7946, Log: slog.New(slog.DiscardHandler)})
	m.SetPeers([]netip.Addr{node(2)})
	n := network{make(chan *memberlist.Packet), make(chan net.Conn)}
	list := must.Get(memberlist.Create(m.config(n)))(f)
	f.Cleanup(func() { list.Shutdown() })
	f.Fuzz(func(t *testing.T, b []byte, stream bool) {
		switch {
		case stream && validStream(b):
			c := text{Reader: bytes.NewReader(b), closed: make(chan struct{})}
			n.streams <- c
			<-c.closed
		case !stream && validPacket(b):
			n.packets <- &memberlist.Packet{Buf: b, From: &net.UDPAddr{}, Timestamp: time.Now()}
		}
	})
}
