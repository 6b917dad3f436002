package members

import (
	"encoding/binary"
	"time"
)

// memberlist's message types.
const (
	msgPing = iota
	msgIndirectPing
	msgAck
	msgSuspect
	msgAlive
	msgDead
	msgPushPull
	msgCompound
	msgUser
	msgCompress
	msgEncrypt
	msgNack
	msgChecksum
	msgError
)

const (
	// nodesMax limits the nodes in a message, because memberlist allocates memory for them before it reads them.
	nodesMax = 5000
	// depthMax is the maximum nesting depth of a message's values, which a node's list of versions reaches.
	depthMax = 3
)

// validPacket reports whether a datagram may be passed to memberlist: its type is one that members send, it is not
// nested, and its content is well formed.
func validPacket(b []byte) bool {
	if len(b) > 5 && b[0] == msgChecksum {
		b = b[5:]
	}
	if len(b) < 2 || b[0] != msgCompound {
		return validPart(b)
	}
	sizes := b[2:]
	n := 2 * int(b[1])
	if len(sizes) < n {
		return false
	}
	parts := sizes[n:]
	for ; n > 0; n -= 2 {
		size := int(binary.BigEndian.Uint16(sizes))
		if size > len(parts) || !validPart(parts[:size]) {
			return false
		}
		sizes, parts = sizes[2:], parts[size:]
	}
	return len(parts) == 0
}

func validPart(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	switch b[0] {
	case msgPing, msgIndirectPing, msgAck, msgSuspect, msgAlive, msgDead, msgNack:
		return validObject(b[1:])
	case msgUser:
		return true
	}
	return false
}

// validStream reports whether a stream's message may be passed to memberlist.
func validStream(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	switch b[0] {
	case msgPing, msgAck, msgError:
		return validObject(b[1:])
	case msgPushPull:
		return validState(b[1:])
	}
	return false
}

// validState reports whether the header is followed by the announced numbers of nodes and state bytes.
func validState(b []byte) bool {
	nodes, size := uint64(0), uint64(0)
	b, ok := fields(b, func(name string, value []byte) (ok bool) {
		switch name {
		case "Nodes":
			nodes, ok = unsigned(value)
			return ok && nodes <= nodesMax
		case "UserStateLen":
			size, ok = unsigned(value)
			return ok
		}
		return true
	})
	for ; ok && nodes > 0; nodes-- {
		b, ok = fields(b, validField)
	}
	return ok && uint64(len(b)) == size
}

func validObject(b []byte) bool {
	rest, ok := fields(b, validField)
	return ok && len(rest) == 0
}

// validField rejects incarnations so high that the named member could not follow with a higher one (epochMax).
func validField(name string, value []byte) bool {
	if name != "Incarnation" {
		return true
	}
	n, ok := unsigned(value)
	return ok && n <= epochMax()/uint64(time.Second)
}

// fields passes each field of a map to valid. It returns the bytes after the map, or false if a field is not valid.
func fields(b []byte, valid func(name string, value []byte) bool) ([]byte, bool) {
	n, b, ok := mapSize(b)
	for ; ok && n > 0; n-- {
		if len(b) == 0 || b[0]&0xe0 != 0xa0 || len(b) < 1+int(b[0]&0x1f) {
			return nil, false
		}
		name, value := string(b[1:1+b[0]&0x1f]), b[1+b[0]&0x1f:]
		if b, ok = skip(value, depthMax-1); ok {
			ok = valid(name, value)
		}
	}
	return b, ok
}

// mapSize returns the number of entries of a map and the bytes after its header.
func mapSize(b []byte) (n int, rest []byte, ok bool) {
	switch {
	case len(b) >= 1 && b[0]&0xf0 == 0x80:
		return int(b[0] & 0x0f), b[1:], true
	case len(b) >= 3 && b[0] == 0xde:
		return int(binary.BigEndian.Uint16(b[1:])), b[3:], true
	}
	return 0, nil, false
}

// unsigned returns a non-negative integer.
func unsigned(b []byte) (uint64, bool) {
	switch {
	case b[0] < 0x80:
		return uint64(b[0]), true
	case b[0] >= 0xcc && b[0] <= 0xcf || b[0] >= 0xd0 && b[0] <= 0xd3 && b[1] < 0x80:
		n := uint64(0)
		for _, x := range b[1 : 1+1<<(b[0]&3)] {
			n = n<<8 | uint64(x)
		}
		return n, true
	}
	return 0, false
}

// skip returns the bytes after a complete MessagePack value with at most this nesting depth.
func skip(b []byte, depth int) (rest []byte, ok bool) {
	if len(b) == 0 || depth < 0 {
		return nil, false
	}
	first, b := b[0], b[1:]
	size, values, ok := 0, 0, true
	switch {
	case first < 0x80 || first >= 0xe0 || first == 0xc0 || first == 0xc2 || first == 0xc3: // small, nil, bool
	case first < 0x90:
		values = 2 * int(first&0x0f)
	case first < 0xa0:
		values = int(first & 0x0f)
	case first < 0xc0:
		size = int(first & 0x1f)
	case first >= 0xcc && first <= 0xcf || first >= 0xd0 && first <= 0xd3: // integers
		size = 1 << (first & 3)
	case first >= 0xc4 && first <= 0xc6: // bytes
		size, b, ok = length(b, 1<<(first-0xc4))
	case first >= 0xd9 && first <= 0xdb: // text
		size, b, ok = length(b, 1<<(first-0xd9))
	case first == 0xdc:
		values, b, ok = length(b, 2)
	case first == 0xde:
		values, b, ok = length(b, 2)
		values *= 2
	default: // floats, extensions, huge lists: no member sends them
		return nil, false
	}
	if !ok || size > len(b) {
		return nil, false
	}
	b = b[size:]
	for ; values > 0; values-- {
		if b, ok = skip(b, depth-1); !ok {
			return nil, false
		}
	}
	return b, true
}

// length returns an n-byte number and the bytes after it.
func length(b []byte, n int) (int, []byte, bool) {
	if len(b) < n {
		return 0, nil, false
	}
	v := 0
	for _, x := range b[:n] {
		v = v<<8 | int(x)
	}
	return v, b[n:], true
}
