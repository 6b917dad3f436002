package main

import (
	"fmt"
	"io"
	"os"

	"aead.dev/minisign"
)

// secretKey reads a minisign secret key. MINISIGN_PASSWORD is the key's password, if it has one.
func secretKey(path string) (key minisign.PrivateKey, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return key, err
	}
	if minisign.IsEncrypted(text) {
		return minisign.DecryptKey(os.Getenv("MINISIGN_PASSWORD"), text)
	}
	err = key.UnmarshalText(text)
	return key, err
}

// sign signs the checksums, and thereby every file. The trusted comment identifies the release.
func (r *release) sign(key string) error {
	secret, err := secretKey(key)
	if err != nil {
		return err
	}
	sums, err := os.Open(r.path(sumsFile))
	if err != nil {
		return err
	}
	defer sums.Close()
	hashed := minisign.NewReader(sums)
	if _, err := io.Copy(io.Discard, hashed); err != nil {
		return err
	}
	trusted := fmt.Sprintf("timestamp:%d\tfile:%s\tsteelyard %s", r.time.Unix(), sumsFile, r.version)
	signature := hashed.SignWithComments(secret, trusted, fmt.Sprintf("signature by minisign key %X", secret.ID()))
	return os.WriteFile(r.path(sumsFile+".minisig"), signature, 0o644)
}
