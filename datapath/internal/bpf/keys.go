package bpf

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// ToAddr returns the C form of an address. IPv4 becomes ::ffff:a.b.c.d (RFC 4291 §2.5.5.2), and the zero Addr all
// zeros.
func ToAddr(a netip.Addr) (out Addr) {
	if !a.IsValid() {
		return out
	}
	b := a.As16()
	for i := range out.W {
		out.W[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

// FromAddr is the inverse of ToAddr. It returns the zero Addr for all zeros, which no backend has as address.
func FromAddr(a Addr) netip.Addr {
	if a == (Addr{}) {
		return netip.Addr{}
	}
	var b [16]byte
	for i, w := range a.W {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

// Swap converts a port between host and network byte order. The programs are built only for little-endian machines.
func Swap(port uint16) uint16 { return bits.ReverseBytes16(port) }

// Swap32 is Swap for 32 bits.
func Swap32(n uint32) uint32 { return bits.ReverseBytes32(n) }

// ToAllowKey returns the key of a source prefix from which clients may open flows to a frontend.
func ToAllowKey(frontend uint32, p netip.Prefix) AllowKey {
	n := p.Bits()
	if p.Addr().Is4() {
		n += 96
	}
	return AllowKey{Prefix: uint32(32 + n), Frontend: Swap32(frontend), Source: ToAddr(p.Addr())}
}

// Proto returns the protocol, which shares a field of the key with the server id.
func (k ServerKey) Proto() uint8 { return uint8(k.Server) }

// SameFlow reports whether a client entry and a server entry belong to the same flow. If not, the client has opened
// another flow from the same port. That flow may use the same source port if it goes to another server.
func (f ClientFlow) SameFlow(k ServerKey, s ServerFlow) bool {
	return f.Backend == s.Backend && f.Source == k.To && f.Sport == k.Dport && f.Dport == k.Sport
}

// Add adds the counters in x.
func (t *Traffic) Add(x Traffic) {
	t.Packets += x.Packets
	t.Bytes += x.Bytes
	t.Flows += x.Flows
	t.Replies += x.Replies
	t.Continued += x.Continued
}

// HandshakeUnit is the unit of handshake_clock (bpf/clock.h).
const HandshakeUnit = 1024 * time.Nanosecond

// Truth returns the C value of b.
func Truth(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

// Uptime returns the time of bpf_ktime_get_coarse_ns.
func Uptime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil {
		panic("datapath: no monotonic clock: " + err.Error())
	}
	return time.Duration(t.Nano())
}

// flowClockShift is FLOW_CLOCK_SHIFT in bpf/flow.h. It sets the unit in which flows store the time of their last
// packet.
const flowClockShift = 22

// FlowClock converts an uptime to the unit in which flows store times.
func FlowClock(uptime time.Duration) uint32 { return uint32(uptime >> flowClockShift) }

// clockAhead bounds how much later than now a packet may have come while the tables were read.
const clockAhead = time.Hour

// Idle returns the time since a flow was last seen, which is negative if a packet came after now. It is exact up to 208
// days.
func Idle(now time.Duration, seen uint32) time.Duration { return since(now, seen, flowClockShift) }

// ageClockShift is AGE_CLOCK_SHIFT in bpf/clock.h.
const ageClockShift = 26

// AgeClock converts an uptime to the unit in which flows store when they opened.
func AgeClock(uptime time.Duration) uint32 { return uint32(uptime >> ageClockShift) }

// Age returns the time since a flow opened, as Idle does. It is exact up to 9 years.
func Age(now time.Duration, opened uint32) time.Duration { return since(now, opened, ageClockShift) }

// since returns the time from then to now, given then in units of 1<<shift ns.
func since(now time.Duration, then uint32, shift int) time.Duration {
	if ahead := then - uint32(now>>shift); ahead < uint32(clockAhead>>shift) {
		return -time.Duration(ahead) << shift
	}
	return time.Duration(uint32(now>>shift)-then) << shift
}

// HashKeys derives the keys of flow_hash (bpf/frontend.h) from a seed.
func HashKeys(seed [32]byte) (keys [10]uint32) {
	sum := sha256.Sum256(append([]byte("steelyard flow hash 0"), seed[:]...))
	more := sha256.Sum256(append([]byte("steelyard flow hash 1"), seed[:]...))
	words := append(sum[:], more[:]...)
	for i := range keys {
		keys[i] = binary.LittleEndian.Uint32(words[4*i:]) | 1 // never zero, because NH would ignore a word
	}
	return keys
}
