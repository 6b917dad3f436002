package members

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
)

// Messages have memberlist's encoding: a label; for streams, a type and a length; then a version, a nonce, and the
// sealed text. memberlist itself has no key, because its decoder crashes on some messages (with wrong padding, or
// empty), and it buffers and decompresses unchecked data.
const (
	labelText   = "steelyard"
	label       = "\xf4\x09" + labelText
	sealVersion = 1 // AES-GCM without padding
	streamSeal  = 10
	nonceSize   = 12
	sealed      = 1 + nonceSize + 16 // bytes in addition to the text
)

// Unencrypted is the publicly known key of members without a secret.
var Unencrypted = []byte("unencrypted")

var errKey = errors.New("not encrypted with a key of the members")

// derive returns the cipher for a key of any length. The key may also have other uses.
func derive(key []byte) (cipher.AEAD, error) {
	sum := sha256.Sum256(append([]byte("steelyard members\x00"), key...))
	block, err := aes.NewCipher(sum[:])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// SetKeys replaces the keys. The first one seals messages; all of them unseal messages. Keys may have any length.
func (m *Members) SetKeys(keys [][]byte) error {
	if len(keys) == 0 {
		return errors.New("no key for the members")
	}
	var list []cipher.AEAD
	for _, k := range keys {
		c, err := derive(k)
		if err != nil {
			return err
		}
		list = append(list, c)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.keys == nil {
		close(m.keyed)
	}
	m.keys = list
	return nil
}

func (m *Members) ciphers() []cipher.AEAD {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.keys
}

func (m *Members) seal(b, text, with []byte) []byte {
	b = append(b, sealVersion)
	nonce := make([]byte, nonceSize)
	rand.Read(nonce) // never fails
	return m.ciphers()[0].Seal(append(b, nonce...), nonce, text, with)
}

func (m *Members) unseal(b, with []byte) ([]byte, error) {
	if len(b) < sealed || b[0] != sealVersion {
		return nil, errKey
	}
	for _, c := range m.ciphers() {
		if text, err := c.Open(nil, b[1:1+nonceSize], b[1+nonceSize:], with); err == nil {
			return text, nil
		}
	}
	return nil, errKey
}

// streamHeader is the part of a stream's message between label and sealed text. It announces size bytes of sealed text
// and is authenticated with them.
func streamHeader(size int) []byte {
	return binary.BigEndian.AppendUint32([]byte{streamSeal}, uint32(size))
}
