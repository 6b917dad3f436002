package table

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// TunnelKeys are the keys of the tunnels between nodes. A packet carries a token that follows from a key, so that a
// receiver knows that a node of the cluster sent it, and not only that it has the address of one.
type TunnelKeys struct {
	Send   []byte   // for the packets that are sent; empty: they have no token
	Accept [][]byte // for the packets that are accepted: with Send, at most three
	// Required drops packets without the token of an accepted key.
	Required bool
}

// Encode returns the keys as the programs have them.
func (k TunnelKeys) Encode() (out bpf.TunnelKeys, err error) {
	out.Send = TunnelToken(k.Send)
	if len(k.Accept) > len(out.Accept) {
		return out, fmt.Errorf("%d keys; at most %d are accepted", len(k.Accept), len(out.Accept))
	}
	for i, key := range k.Accept {
		out.Accept[i] = TunnelToken(key)
	}
	if k.Required && len(k.Accept) == 0 {
		return out, errors.New("a key is required and none accepted")
	}
	out.Required = uint32(bpf.Truth(k.Required))
	return out, nil
}

// TunnelToken returns the token of a key. It is never 0, which is no token. The key itself is never sent.
func TunnelToken(key []byte) uint64 {
	if len(key) == 0 {
		return 0
	}
	sum := sha256.Sum256(append([]byte("steelyard tunnel token\x00"), key...))
	return max(1, binary.BigEndian.Uint64(sum[:]))
}
