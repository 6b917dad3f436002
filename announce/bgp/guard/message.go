package guard

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// Sizes of a message in bytes (RFC 4271, section 4.1). Extended messages (RFC 8654) are not negotiated.
const (
	headerLen  = 19
	maxMessage = 4096
)

// messageType is the type of a message (RFC 4271, section 4.1; RFC 2918 for ROUTE-REFRESH).
type messageType uint8

const (
	typeOpen         messageType = 1
	typeUpdate       messageType = 2
	typeNotification messageType = 3
	typeKeepalive    messageType = 4
	typeRouteRefresh messageType = 5
)

func (t messageType) String() string {
	switch t {
	case typeOpen:
		return "OPEN"
	case typeUpdate:
		return "UPDATE"
	case typeNotification:
		return "NOTIFICATION"
	case typeKeepalive:
		return "KEEPALIVE"
	case typeRouteRefresh:
		return "ROUTE-REFRESH"
	}
	return fmt.Sprintf("message type %d", uint8(t))
}

// validLength reports whether a message of this type may have n bytes, including the header (RFC 4271, section 6.1; RFC
// 7313, section 3).
func (t messageType) validLength(n int) bool {
	switch t {
	case typeOpen:
		return n >= 29
	case typeUpdate:
		return n >= 23
	case typeNotification:
		return n >= 21
	case typeKeepalive:
		return n == headerLen
	default:
		return n >= headerLen+4
	}
}

type message struct {
	kind messageType
	raw  []byte // with the header
}

func (m message) body() []byte { return m.raw[headerLen:] }

// messageReader reads messages and validates their headers.
type messageReader struct {
	r   *bufio.Reader
	buf [maxMessage]byte
}

func newMessageReader(r io.Reader) *messageReader {
	return &messageReader{r: bufio.NewReaderSize(r, 2*maxMessage)}
}

// next returns the next message. The error is an *Error if the header is invalid; otherwise it comes from the
// connection.
func (r *messageReader) next() (message, error) {
	head := r.buf[:headerLen]
	if _, err := io.ReadFull(r.r, head); err != nil {
		return message{}, err
	}
	for _, b := range head[:16] {
		if b != 0xff {
			return message{}, protocolError(codeHeader, 1, nil, "a message header has no marker")
		}
	}
	length, kind := binary.BigEndian.Uint16(head[16:]), messageType(head[18])
	n := int(length)
	if kind < typeOpen || kind > typeRouteRefresh {
		return message{}, protocolError(codeHeader, 3, head[18:19], "unknown message type %d", uint8(kind))
	}
	if n > maxMessage || !kind.validLength(n) {
		return message{}, protocolError(codeHeader, 2, head[16:18], "%v of %d bytes", kind, n)
	}
	if _, err := io.ReadFull(r.r, r.buf[headerLen:n]); err != nil {
		return message{}, err
	}
	return message{kind, r.buf[:n]}, nil
}

func encode(kind messageType, body []byte) []byte {
	b := make([]byte, headerLen, headerLen+len(body))
	for i := range 16 {
		b[i] = 0xff
	}
	binary.BigEndian.PutUint16(b[16:], uint16(headerLen+len(body)))
	b[18] = byte(kind)
	return append(b, body...)
}

var keepalive = encode(typeKeepalive, nil)
