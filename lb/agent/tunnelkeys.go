package agent

import (
	"crypto/sha256"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
)

// fileKeys returns the tunnel keys of the configuration, or nil if the cluster's Secret is used.
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

// fileSeed returns the configuration's hash seed, or a constant if it has none.
func fileSeed(c *config.Config) (seed [32]byte) {
	if c.Datapath.HashSeed.IsSet() {
		seed = sha256.Sum256([]byte("steelyard hash seed\x00" + c.Datapath.HashSeed.Reveal()))
	}
	return seed
}
