package datapath

import (
	"fmt"
	"net/netip"

	"github.com/steelyard-lb/steelyard/datapath/internal/table"
)

// TunnelKeys are the keys of the tunnels between nodes.
type TunnelKeys = table.TunnelKeys

// SetTunnelSources makes the datapath accept tunnel packets only from these addresses and from Options.TunnelSources.
func (d *Datapath) SetTunnelSources(addrs []netip.Addr) error { return d.tunnels.Set(addrs) }

// SetTunnelKeys replaces the tunnel keys.
func (d *Datapath) SetTunnelKeys(k TunnelKeys) error {
	value, err := k.Encode()
	if err != nil {
		return fmt.Errorf("set the tunnel keys: %w", err)
	}
	if err := d.objects.SyTunnelKeys.Put(uint32(0), value); err != nil {
		return fmt.Errorf("set the tunnel keys: %w", err)
	}
	return nil
}
