package capture

import (
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// Types of blocks and options (draft-ietf-opsawg-pcapng).
const (
	blockSection, blockInterface, blockPacket = 0x0a0d0d0a, 1, 6
	optionEnd, optionComment                  = 0, 1
	interfaceName, interfaceResolution        = 2, 9
	packetFlags                               = 2
)

// File writes packets in the format pcapng.
type File struct {
	w          io.Writer
	interfaces map[string]uint32 // numbers by name
}

// NewFile writes the header of a file.
func NewFile(w io.Writer) (*File, error) {
	f := &File{w, map[string]uint32{}}
	section := binary.LittleEndian.AppendUint32(nil, 0x1a2b3c4d) // the byte order
	section = binary.LittleEndian.AppendUint32(section, 1)       // version 1.0
	section = binary.LittleEndian.AppendUint64(section, ^uint64(0))
	return f, f.block(blockSection, section)
}

// Write writes a packet as it arrived and, unless it was dropped, as it left. Comments say what was done with it.
func (f *File) Write(p lb.TracedPacket) error {
	const inbound, outbound = 1, 2
	before := uint32(inbound)
	if strings.HasSuffix(p.Hook, "-out") {
		before = outbound
	}
	comment := fmt.Sprintf("before, %s %s: %s, %s", p.Interface, p.Hook, p.Action, about(p))
	if err := f.frame(p.Interface, p.Time, p.Before, comment, before); err != nil || len(p.After.Bytes) == 0 {
		return err
	}
	if p.Egress == "" {
		return f.frame(p.Interface, p.Time, p.After, "after, to the stack of "+p.Interface, inbound)
	}
	return f.frame(p.Egress, p.Time, p.After, "after, "+p.Egress, outbound)
}

// frame writes one frame that an interface received or sent.
func (f *File) frame(name string, at time.Time, frame lb.Frame, comment string, flags uint32) error {
	number, known := f.interfaces[name]
	if !known {
		number = uint32(len(f.interfaces))
		f.interfaces[name] = number
		body := binary.LittleEndian.AppendUint32(nil, 1)    // LINKTYPE_ETHERNET
		body = binary.LittleEndian.AppendUint32(body, 0)    // no limit on the length
		body = option(body, interfaceName, []byte(name))    //
		body = option(body, interfaceResolution, []byte{9}) // nanoseconds
		if err := f.block(blockInterface, option(body, optionEnd, nil)); err != nil {
			return err
		}
	}
	body := binary.LittleEndian.AppendUint32(nil, number)
	body = binary.LittleEndian.AppendUint32(body, uint32(at.UnixNano()>>32))
	body = binary.LittleEndian.AppendUint32(body, uint32(at.UnixNano()))
	body = binary.LittleEndian.AppendUint32(body, uint32(len(frame.Bytes)))
	body = binary.LittleEndian.AppendUint32(body, uint32(frame.Length))
	body = padded(append(body, frame.Bytes...))
	body = option(body, optionComment, []byte(comment))
	body = option(body, packetFlags, binary.LittleEndian.AppendUint32(nil, flags))
	return f.block(blockPacket, option(body, optionEnd, nil))
}

// block writes a block, whose length precedes and follows its body.
func (f *File) block(kind uint32, body []byte) error {
	size := uint32(12 + len(body))
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, size), kind)
	b = append(binary.LittleEndian.AppendUint32(b, size), body...)
	_, err := f.w.Write(binary.LittleEndian.AppendUint32(b, size))
	if err != nil {
		return fmt.Errorf("write the capture: %w", err)
	}
	return nil
}

func option(b []byte, code uint16, value []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(value)))
	return padded(append(b, value...))
}

// padded fills up to a multiple of four bytes, as everything in a block.
func padded(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}
