package bpf

import (
	"crypto/sha256"
	"encoding/binary"
)

// HashKeys derives the keys of flow_hash (bpf/frontend.h) from a seed.
func HashKeys(seed [32]byte) (keys [10]uint32) {
	sum := sha256.Sum256(append([]byte("steelyard flow hash 0"), seed[:]...))
	more := sha256.Sum256(append([]byte("steelyard flow hash 1"), seed[:]...))
	words := append(sum[:], more[:]...)
	for i := range keys {
		keys[i] = binary.LittleEndian.Uint32(words[4*i:]) | 1 // never zero: NH would lose a word
	}
	return keys
}
