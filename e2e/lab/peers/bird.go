package peers

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

const (
	birdSocket = "/run/bird/bird.ctl"
	birdConfig = "/run/bird/bird.conf"
)

// bird runs BIRD 2.
type bird struct{ birdc string }

func (b *bird) start(ctx context.Context, h *lab.Host, c RouterConfig) ([]*lab.Process, error) {
	path, err := program("bird", "bird2")
	if err != nil {
		return nil, err
	}
	if b.birdc, err = program("birdc", "bird2"); err != nil {
		return nil, err
	}
	if err := h.WriteFile(birdConfig, birdText(c), 0o600); err != nil {
		return nil, err
	}
	p, err := h.Start(lab.Command{Path: path, Args: []string{"-f", "-c", birdConfig, "-s", birdSocket}})
	if err != nil {
		return nil, err
	}
	all := []*lab.Process{p}
	_, err = lab.Until(ctx, lab.Ready, "bird responds", func() error {
		if err := ended(all); err != nil {
			return err
		}
		_, err := b.show(ctx, h, "show status")
		return err
	})
	return all, err
}

// birdText returns BIRD's configuration, with minimal connect, retry and error delays.
func birdText(c RouterConfig) string {
	hold := int(c.HoldTime.Seconds())
	var s strings.Builder
	fmt.Fprintf(&s, "router id %s;\nlog stderr all;\ndebug protocols { states };\n", c.ID)
	s.WriteString("protocol device { scan time 1; }\n")
	for _, f := range []string{"ipv4", "ipv6"} {
		s.WriteString("protocol kernel { scan time 1; merge paths on limit 16;\n")
		fmt.Fprintf(&s, "  %s { import none; export all; }; }\n", f)
	}
	if slices.ContainsFunc(c.Neighbors, func(n Neighbor) bool { return n.BFD }) {
		s.WriteString("protocol bfd { }\n")
	}
	transit := slices.ContainsFunc(c.Neighbors, func(n Neighbor) bool { return n.Transit })
	for i, n := range c.Neighbors {
		fmt.Fprintf(&s, "protocol bgp %s {\n  local as %d;\n", birdName(i), c.ASN)
		fmt.Fprintf(&s, "  neighbor %s as %d;\n", n.Address, n.ASN)
		fmt.Fprintf(&s, "  hold time %d; keepalive time %d;\n", hold, max(1, hold/3))
		s.WriteString("  connect delay time 1; connect retry time 1; error wait time 1, 2; error forget time 1;\n")
		s.WriteString("  graceful restart aware;\n")
		if n.Password != "" {
			fmt.Fprintf(&s, "  password %q;\n", n.Password)
		}
		if n.Passive {
			s.WriteString("  passive on;\n")
		}
		if n.BFD {
			fmt.Fprintf(&s, "  bfd { interval 100 ms; multiplier %d; };\n", cmp.Or(n.BFDMultiplier, 3))
		}
		filters := "import all; export none;"
		if transit {
			filters = "import filter { if (65535, 0) ~ bgp_community then bgp_local_pref = 0; accept; };"
			if filters += " export none;"; n.Transit {
				filters = strings.Replace(filters, "export none", "export where source = RTS_BGP", 1)
			}
		}
		if n.Address.Is4() {
			fmt.Fprintf(&s, "  ipv4 { %s };\n", filters)
		}
		fmt.Fprintf(&s, "  ipv6 { %s };\n}\n", filters)
	}
	return s.String()
}

func birdName(i int) string { return fmt.Sprintf("peer%d", i) }

func (b *bird) show(ctx context.Context, h *lab.Host, command string) (string, error) {
	return h.Run(ctx, b.birdc, append([]string{"-s", birdSocket}, strings.Fields(command)...)...)
}

func (b *bird) peers(ctx context.Context, h *lab.Host, c RouterConfig) (map[netip.Addr]PeerState, error) {
	out, err := b.show(ctx, h, "show protocols")
	if err != nil {
		return nil, err
	}
	byName := map[string]PeerState{}
	for _, line := range strings.Split(out, "\n") {
		// columns: name, protocol, table, state, since, information
		if f := strings.Fields(line); len(f) >= 5 && f[1] == "BGP" {
			info := strings.Join(f[5:], " ")
			byName[f[0]] = PeerState{Established: info == "Established", Info: info}
		}
	}
	peers := map[netip.Addr]PeerState{}
	for i, n := range c.Neighbors {
		peers[n.Address] = byName[birdName(i)]
	}
	return peers, nil
}

func (b *bird) reset(ctx context.Context, h *lab.Host, c RouterConfig, neighbor netip.Addr) error {
	for i, n := range c.Neighbors {
		if n.Address == neighbor {
			_, err := b.show(ctx, h, "restart "+birdName(i))
			return err
		}
	}
	return fmt.Errorf("host %s has no neighbour %s", h, neighbor)
}
