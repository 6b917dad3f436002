package agent

import (
	"crypto/sha256"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
)

// fileKeys returns the tunnel keys of the configuration. Nil: those of the cluster's Secret are used.
func fileKeys(c *config.Config) *datapath.TunnelKeys {
	if len(c.Datapath.TunnelKeys) == 0 && c.Kubernetes != nil {
		return nil
	}
	var keys datapath.TunnelKeys
	for _, k := range c.Datapath.TunnelKeys {
		keys.Accept = append(keys.Accept, []byte(k.Reveal()))
		keys.Send, keys.Required = keys.Accept[0], true
	}
	return &keys
}

// fileSeed returns the hash seed of the configuration; without one, a constant.
func fileSeed(c *config.Config) (seed [32]byte) {
	if c.Datapath.HashSeed.IsSet() {
		seed = sha256.Sum256([]byte("steelyard hash seed\x00" + c.Datapath.HashSeed.Reveal()))
	}
	return seed
}
