package table

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// TunnelKeys are the keys of the tunnels between nodes. A packet carries a token derived from a key, which shows the
// receiver that a node of the cluster sent it, and not just a host with a node's address.
type TunnelKeys struct {
	Send   []byte   // for sent packets, which have no token if it is empty
	Accept [][]byte // for received packets: at most three, including Send
	// Required drops packets without the token of an accepted key.
	Required bool
}

// Encode returns the keys in the programs' format.
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

// TunnelToken returns the token of a key, or 0, which means no token, if the key is empty. The key itself is never
// sent.
func TunnelToken(key []byte) uint64 {
	if len(key) == 0 {
		return 0
	}
	sum := sha256.Sum256(append([]byte("steelyard tunnel token\x00"), key...))
	return max(1, binary.BigEndian.Uint64(sum[:]))
}
