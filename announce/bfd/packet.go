package bfd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// State is the state of a session (RFC 5880, section 4.1).
type State uint8

const (
	AdminDown State = iota
	Down
	Init
	Up
)

func (s State) String() string {
	return [...]string{"admin-down", "down", "init", "up"}[s&3]
}

// Diag is the reason for the last change to a state other than up (RFC 5880, section 4.1).
type Diag uint8

const (
	DiagNone         Diag = 0
	DiagTimeExpired  Diag = 1
	DiagNeighborDown Diag = 3
	DiagAdminDown    Diag = 7
)

func (d Diag) String() string {
	names := [...]string{
		"no diagnostic", "control detection time expired", "echo function failed", "neighbor signaled session down",
		"forwarding plane reset", "path down", "concatenated path down", "administratively down",
		"reverse concatenated path down",
	}
	if int(d) < len(names) {
		return names[d]
	}
	return fmt.Sprintf("diagnostic %d", uint8(d))
}

// Packet is a control packet (RFC 5880, section 4.1) without authentication. Intervals are whole microseconds.
type Packet struct {
	State                       State
	Diag                        Diag
	Poll, Final, Independent    bool // Independent is the control plane independent (C) bit
	Demand                      bool
	Multiplier                  uint8
	MyDiscriminator             uint32
	YourDiscriminator           uint32
	DesiredMinTx, RequiredMinRx time.Duration
	RequiredMinEchoRx           time.Duration
}

const (
	version   = 1
	packetLen = 24

	flagPoll, flagFinal, flagIndependent = 0x20, 0x10, 0x08
	flagAuth, flagDemand, flagMultipoint = 0x04, 0x02, 0x01
)

// Parse decodes a packet and applies the rules of RFC 5880, section 6.8.6, that need no session.
func Parse(b []byte) (Packet, error) {
	if len(b) < packetLen {
		return Packet{}, fmt.Errorf("%d bytes, want at least %d", len(b), packetLen)
	}
	flags, length := b[1], int(b[3])
	p := Packet{
		Diag: Diag(b[0] & 0x1f), State: State(flags >> 6),
		Poll: flags&flagPoll != 0, Final: flags&flagFinal != 0, Independent: flags&flagIndependent != 0,
		Demand: flags&flagDemand != 0, Multiplier: b[2],
		MyDiscriminator: binary.BigEndian.Uint32(b[4:]), YourDiscriminator: binary.BigEndian.Uint32(b[8:]),
		DesiredMinTx: interval(b[12:]), RequiredMinRx: interval(b[16:]), RequiredMinEchoRx: interval(b[20:]),
	}
	switch {
	case b[0]>>5 != version:
		return Packet{}, fmt.Errorf("version %d, want %d", b[0]>>5, version)
	case length < packetLen || length > len(b):
		return Packet{}, fmt.Errorf("length %d in a datagram of %d bytes", length, len(b))
	case flags&flagAuth != 0:
		return Packet{}, errors.New("the packet is authenticated, but this node has no key")
	case flags&flagMultipoint != 0:
		return Packet{}, errors.New("the multipoint bit is set")
	case p.Multiplier == 0:
		return Packet{}, errors.New("the detect multiplier is 0")
	case p.MyDiscriminator == 0:
		return Packet{}, errors.New("the sender's discriminator is 0")
	case p.YourDiscriminator == 0 && p.State > Down:
		return Packet{}, fmt.Errorf("state %v without the receiver's discriminator", p.State)
	}
	return p, nil
}

// Append appends the encoded packet to b.
func (p Packet) Append(b []byte) []byte {
	flags := byte(p.State) << 6
	for _, f := range []struct {
		set bool
		bit byte
	}{
		{p.Poll, flagPoll}, {p.Final, flagFinal}, {p.Independent, flagIndependent}, {p.Demand, flagDemand},
	} {
		if f.set {
			flags |= f.bit
		}
	}
	b = append(b, version<<5|byte(p.Diag), flags, p.Multiplier, packetLen)
	for _, v := range []uint32{
		p.MyDiscriminator, p.YourDiscriminator,
		uint32(p.DesiredMinTx.Microseconds()), uint32(p.RequiredMinRx.Microseconds()),
		uint32(p.RequiredMinEchoRx.Microseconds()),
	} {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return b
}

func interval(b []byte) time.Duration {
	return time.Duration(binary.BigEndian.Uint32(b)) * time.Microsecond
}
