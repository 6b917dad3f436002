package members

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/steelyard-lb/steelyard/lb"
)

// These limit what other hosts can make a member store.
const (
	streamsMax = 4       // per member
	streamMin  = 1 << 20 // bytes a member may send; more if this node has as much itself
	streamMax  = 20 << 20
	// receiveBuffer is the UDP socket's buffer size, in bytes.
	receiveBuffer = 2 << 20
	// strangerInterval is the minimum time between log lines about hosts that are not members.
	strangerInterval = time.Minute
)

// transport is memberlist's network. It passes on only sealed, small and well-formed messages from configured members,
// because memberlist parses messages in its own goroutines, where a panic ends the process. It sends only to configured
// members, because a message may name another receiver.
type transport struct {
	m       *Members
	tcp     *net.TCPListener
	udp     *net.UDPConn
	packets chan *memberlist.Packet
	streams chan net.Conn
	done    chan struct{}
	running sync.WaitGroup

	mu       sync.Mutex // guards all below
	open     map[netip.Addr]int
	stranger time.Time // when a non-member was last logged
}

func newTransport(m *Members) (*transport, error) {
	at := netip.AddrPortFrom(m.table.self, m.o.Port)
	tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return nil, err
	}
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		tcp.Close()
		return nil, err
	}
	if err := udp.SetReadBuffer(receiveBuffer); err != nil {
		m.o.Log.Debug("receive buffer not set", "err", err)
	}
	t := &transport{
		m: m, tcp: tcp, udp: udp, packets: make(chan *memberlist.Packet), streams: make(chan net.Conn),
		done: make(chan struct{}), open: map[netip.Addr]int{},
	}
	t.running.Go(t.receive)
	t.running.Go(t.accept)
	return t, nil
}

// receive passes datagrams to memberlist until the socket is closed.
func (t *transport) receive() {
	b := make([]byte, 1<<16)
	for {
		n, from, err := t.udp.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || !t.accepts(from.Addr()) {
			continue
		}
		var text []byte
		t.m.o.Boundary.Do(lb.PartMember, from.Addr().String(), func() { text = t.read(b[:n]) })
		if text == nil {
			continue
		}
		t.m.table.hear(from.Addr().Unmap())
		p := &memberlist.Packet{Buf: text, From: net.UDPAddrFromAddrPort(from), Timestamp: time.Now()}
		select {
		case t.packets <- p:
		case <-t.done:
			return
		}
	}
}

// read returns the text of a datagram, or nil if it is invalid.
func (t *transport) read(b []byte) []byte {
	sealed, labelled := bytes.CutPrefix(b, []byte(label))
	text, err := t.m.unseal(sealed, []byte(labelText))
	if !labelled || err != nil || !validPacket(text) {
		return nil
	}
	return text
}

// call sends empty messages to peers that do not respond until ctx ends. One that receives them, but whose own messages
// do not arrive here, takes no address from this node (Peer.Heard).
func (t *transport) call(ctx context.Context) {
	tick := time.NewTicker(callInterval)
	defer tick.Stop()
	for ctx.Err() == nil {
		for _, a := range some(t.m.table.missing(true), callAtOnce) {
			_, _ = t.WriteTo([]byte{msgUser}, netip.AddrPortFrom(a, t.m.o.Port).String())
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// some returns at most n elements of list, chosen at random.
func some(list []netip.Addr, n int) []netip.Addr {
	rand.Shuffle(len(list), func(i, k int) { list[i], list[k] = list[k], list[i] })
	return list[:min(len(list), n)]
}

// accept passes connections to memberlist until the listener is closed.
func (t *transport) accept() {
	for {
		c, err := t.tcp.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of file descriptors
			select {
			case <-time.After(10 * time.Millisecond):
				continue
			case <-t.done:
				return
			}
		}
		from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if !t.accepts(from) || !t.take(from) {
			c.SetLinger(0)
			c.Close()
			continue
		}
		s := &stream{Conn: c, m: t.m, limit: t.limit(), closed: sync.OnceFunc(func() { t.give(from) })}
		select {
		case t.streams <- s:
		case <-t.done:
			s.Close()
			return
		}
	}
}

// limit returns the maximum size of a member's message. Members store similar amounts of data, so twice this member's
// size is sufficient.
func (t *transport) limit() int { return min(max(streamMin, 2*t.m.table.size()), streamMax) }

// accepts reports whether a host is a configured member. It occasionally logs others.
func (t *transport) accepts(from netip.Addr) bool {
	if t.m.table.isPeer(from.Unmap()) {
		return true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if from.Unmap() != t.m.table.self && time.Since(t.stranger) >= strangerInterval {
		t.stranger = time.Now()
		t.m.o.Log.Warn("discarding messages from a host that is not a member", "host", from.Unmap())
	}
	return false
}

// take counts a connection from a member, or returns false if it has too many.
func (t *transport) take(from netip.Addr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open[from] == streamsMax {
		return false
	}
	t.open[from]++
	return true
}

func (t *transport) give(from netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open[from]--; t.open[from] == 0 {
		delete(t.open, from)
	}
}

// peer returns the member that a memberlist address refers to.
func (t *transport) peer(addr string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(addr)
	if err != nil || a.Port() != t.m.o.Port || !t.m.table.isPeer(a.Addr().Unmap()) {
		return a, fmt.Errorf("%.40q is not a configured member", addr)
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
}

// FinalAdvertiseAddr implements memberlist.Transport.
func (t *transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return t.m.table.self.AsSlice(), int(t.m.o.Port), nil
}

// WriteTo implements memberlist.Transport.
func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	to, err := t.peer(addr)
	if err == nil {
		_, err = t.udp.WriteToUDPAddrPort(t.m.seal([]byte(label), b, []byte(labelText)), to)
	}
	return time.Now(), err
}

// PacketCh implements memberlist.Transport.
func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh implements memberlist.Transport.
func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// DialTimeout implements memberlist.Transport. It binds to this node's address, because addresses identify members.
func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	to, err := t.peer(addr)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{Timeout: timeout, LocalAddr: &net.TCPAddr{IP: t.m.table.self.AsSlice()}}
	c, err := d.Dial("tcp", to.String())
	if err != nil {
		return nil, err
	}
	return &stream{Conn: c, m: t.m, limit: streamMax, closed: func() {}}, nil
}

// Shutdown implements memberlist.Transport.
func (t *transport) Shutdown() error {
	close(t.done)
	err := errors.Join(t.tcp.Close(), t.udp.Close())
	t.running.Wait()
	return err
}

type stream struct {
	net.Conn
	m      *Members
	limit  int // for reading
	text   io.Reader
	closed func()
}

// Read returns data only from a message that was completely received and is valid.
func (s *stream) Read(b []byte) (int, error) {
	if s.text == nil {
		text, err := []byte(nil), errors.New("could not process a message")
		s.m.o.Boundary.Do(lb.PartMember, s.RemoteAddr().String(), func() { text, err = s.receive() })
		if err != nil {
			return 0, err
		}
		s.text = bytes.NewReader(text)
	}
	return s.text.Read(b)
}

func (s *stream) receive() ([]byte, error) {
	head := make([]byte, len(label)+len(streamHeader(0)))
	if _, err := io.ReadFull(s.Conn, head); err != nil {
		return nil, err
	}
	header, labelled := bytes.CutPrefix(head, []byte(label))
	if !labelled || header[0] != streamSeal {
		return nil, errKey
	}
	size, _, _ := length(header[1:], 4)
	if size > s.limit {
		return nil, fmt.Errorf("a message of %d bytes exceeds the limit of %d", size, s.limit)
	}
	var all bytes.Buffer // grows with the received data
	if n, err := io.CopyN(&all, s.Conn, int64(size)); err != nil {
		return nil, fmt.Errorf("received %d of %d bytes: %w", n, size, err)
	}
	text, err := s.m.unseal(all.Bytes(), append(header, labelText...))
	if err == nil && !validStream(text) {
		err = errors.New("invalid message")
	}
	return text, err
}

func (s *stream) Write(b []byte) (int, error) {
	header := streamHeader(sealed + len(b))
	with := append(bytes.Clone(header), labelText...)
	if _, err := s.Conn.Write(s.m.seal(append([]byte(label), header...), b, with)); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (s *stream) Close() error {
	s.closed()
	return s.Conn.Close()
}
