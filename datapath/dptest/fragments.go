package dptest

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/steelyard-lb/steelyard/datapath/checksum"
)

// Fragments returns the frames of p's fragments, each with at most size bytes of payload. size must be a multiple of 8.
func (p Packet) Fragments(id uint32, size int) (frames [][]byte) {
	whole := p.Frame()
	l3 := 14
	head := l3 + 20
	if !p.v4() {
		head = l3 + 40
	}
	body := whole[head:]
	for at := 0; at < len(body); at += size {
		part := body[at:min(at+size, len(body))]
		more := uint16(0)
		if at+size < len(body) {
			more = 1
		}
		f := bytes.Clone(whole[:head])
		if p.v4() {
			binary.BigEndian.PutUint16(f[l3+2:], uint16(20+len(part)))
			binary.BigEndian.PutUint16(f[l3+4:], uint16(id))
			binary.BigEndian.PutUint16(f[l3+6:], more<<13|uint16(at/8))
			binary.BigEndian.PutUint16(f[l3+10:], 0)
			binary.BigEndian.PutUint16(f[l3+10:], checksum.Internet(f[l3:head]))
		} else {
			binary.BigEndian.PutUint16(f[l3+4:], uint16(8+len(part)))
			ext := []byte{f[l3+6], 0, 0, 0}
			binary.BigEndian.PutUint16(ext[2:], uint16(at)|more)
			f[l3+6] = 44
			f = append(f, binary.BigEndian.AppendUint32(ext, id)...)
		}
		frames = append(frames, append(f, part...))
	}
	return frames
}

// Join is the inverse of Fragments for frames in their original order.
func Join(frames [][]byte) (Packet, error) {
	const l3 = 14
	var whole []byte
	for i, f := range frames {
		v4 := binary.BigEndian.Uint16(f[12:]) == 0x0800
		head, skip := l3+20, 0
		if !v4 {
			head, skip = l3+40, 8
		}
		if v4 && checksum.Internet(f[l3:head]) != 0 {
			return Packet{}, fmt.Errorf("IPv4 checksum of fragment %d is wrong", i)
		}
		if i == 0 {
			whole = bytes.Clone(f[:head])
			if !v4 {
				whole[l3+6] = f[head]
			}
		} else if !bytes.Equal(f[head-8:head], frames[0][head-8:head]) {
			return Packet{}, fmt.Errorf("fragment %d has another destination", i)
		}
		whole = append(whole, f[head+skip:]...)
	}
	if binary.BigEndian.Uint16(whole[12:]) == 0x0800 {
		binary.BigEndian.PutUint16(whole[l3+2:], uint16(len(whole)-l3))
		copy(whole[l3+6:], []byte{0, 0})
		copy(whole[l3+10:], []byte{0, 0})
		binary.BigEndian.PutUint16(whole[l3+10:], checksum.Internet(whole[l3:l3+20]))
	} else {
		binary.BigEndian.PutUint16(whole[l3+4:], uint16(len(whole)-l3-40))
	}
	return Parse(whole)
}
