package members

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"slices"
)

// derive returns keys of AES-256 from keys of any length, which may have another use, too.
func derive(keys [][]byte) (list [][]byte) {
	for _, k := range keys {
		sum := sha256.Sum256(append([]byte("steelyard members\x00"), k...))
		list = append(list, sum[:])
	}
	return list
}

// setKeys replaces the keys of the keyring. RemoveKey moves keys in an array that a reader may use without a lock, so
// only the last key of the ring is removed.
func (m *Members) setKeys(keys [][]byte) error {
	if len(keys) == 0 {
		return errors.New("no key for the members")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, k := range keys {
		errs = append(errs, m.keyring.AddKey(k))
	}
	for _, k := range slices.Backward(keys) {
		errs = append(errs, m.keyring.UseKey(k)) // the keys are first then, in their order
	}
	for all := m.keyring.GetKeys(); len(all) > len(keys); all = m.keyring.GetKeys() {
		last := all[len(all)-1]
		if slices.ContainsFunc(keys, func(k []byte) bool { return bytes.Equal(k, last) }) {
			break // a key was given twice
		}
		errs = append(errs, m.keyring.RemoveKey(last))
	}
	select {
	case <-m.keyed:
	default:
		close(m.keyed)
	}
	return errors.Join(errs...)
}
