// Package checksum computes the Internet checksum. It imports only the standard library, and any package may import it.
package checksum

import "encoding/binary"

// Internet returns the Internet checksum (RFC 1071) of the concatenation of parts. Every part except the last must have
// an even length. Over data that contains its own checksum, the result is 0.
func Internet(parts ...[]byte) uint16 {
	var sum uint64 // cannot overflow below 2^48 words
	for _, b := range parts {
		for ; len(b) >= 2; b = b[2:] {
			sum += uint64(binary.BigEndian.Uint16(b))
		}
		if len(b) == 1 {
			sum += uint64(b[0]) << 8
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
