package lab

import (
	"context"
	"fmt"
)

// Drop makes the host drop packets that match an expression of nftables at a hook: input, forward or output. It needs
// the program nft.
func (h *Host) Drop(ctx context.Context, hook, match string) error {
	const chain = "add table inet lab; add chain inet lab %[1]s { type filter hook %[1]s priority 0; }; "
	_, err := h.Run(ctx, "nft", fmt.Sprintf(chain+"add rule inet lab %[1]s %[2]s drop", hook, match))
	return err
}

// StopDropping reverses all calls of Drop.
func (h *Host) StopDropping(ctx context.Context) error {
	_, err := h.Run(ctx, "nft", "delete table inet lab")
	return err
}
