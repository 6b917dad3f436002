package peers

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

const (
	frrDir   = "/run/frr"
	frrGroup = "frrvty" // a daemon's user must be a member: Debian builds FRR with --enable-vty-group
)

// frr runs FRR's zebra and bgpd, and bfdd for neighbours with BFD.
type frr struct{ vtysh string }

func (f *frr) start(ctx context.Context, h *lab.Host, c RouterConfig) ([]*lab.Process, error) {
	var err error
	if f.vtysh, err = program("vtysh", "frr"); err != nil {
		return nil, err
	}
	configs := map[string]string{"zebra": "hostname " + h.Name() + "\n", "bgpd": frrText(c), "bfdd": frrProfile(c)}
	names := []string{"zebra", "bgpd"}
	if slices.ContainsFunc(c.Neighbors, func(n Neighbor) bool { return n.BFD }) {
		names = []string{"zebra", "bfdd", "bgpd"}
	}
	var all []*lab.Process
	// zebra must be first, because a bgpd without zebra retries only after ten seconds.
	for _, name := range names {
		path, err := program(name, "frr")
		if err != nil {
			return nil, err
		}
		config := frrDir + "/" + name + ".conf"
		if err := h.WriteFile(config, configs[name], 0o600); err != nil {
			return nil, err
		}
		// The daemons run as root, because changing the user clears the parent-death signal (prctl(2)), and a daemon
		// would then outlive this process.
		args := []string{
			"-u", "root", "-g", frrGroup, "-f", config, "-z", frrDir + "/zserv.api", "-i", frrDir + "/" + name + ".pid",
			"--vty_socket", frrDir, "-P", "0", "--log", "stdout", "--log-level", "info",
		}
		if name == "bfdd" {
			args = append(args, "--bfdctl", frrDir+"/bfdd.sock")
		}
		p, err := h.Start(lab.Command{Path: path, Args: args})
		if err != nil {
			return nil, err
		}
		all = append(all, p)
		_, err = lab.Until(ctx, lab.Ready, name+" responds", func() error {
			if err := ended(all); err != nil {
				return err
			}
			_, err := h.Run(ctx, f.vtysh, "--vty_socket", frrDir, "-d", name, "-c", "show version")
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

func frrProfile(c RouterConfig) string {
	multiplier := 3
	if i := slices.IndexFunc(c.Neighbors, func(n Neighbor) bool { return n.BFD }); i >= 0 {
		multiplier = cmp.Or(c.Neighbors[i].BFDMultiplier, 3)
	}
	return fmt.Sprintf("bfd\n profile fast\n  receive-interval 100\n  transmit-interval 100\n  detect-multiplier %d\n",
		multiplier)
}

func frrText(c RouterConfig) string {
	hold := int(c.HoldTime.Seconds())
	var s strings.Builder
	fmt.Fprintf(&s, "router bgp %d\n bgp router-id %s\n", c.ASN, c.ID)
	s.WriteString(" bgp log-neighbor-changes\n no bgp default ipv4-unicast\n no bgp ebgp-requires-policy\n")
	s.WriteString(" bgp bestpath as-path multipath-relax\n")
	for _, n := range c.Neighbors {
		unnumbered := ""
		if n.Interface != "" {
			unnumbered = " interface"
		}
		fmt.Fprintf(&s, " neighbor %s%s remote-as %d\n", n.name(), unnumbered, n.ASN)
		fmt.Fprintf(&s, " neighbor %s timers %d %d\n", n.name(), max(1, hold/3), hold)
		fmt.Fprintf(&s, " neighbor %s timers connect 1\n", n.name())
		if n.Password != "" {
			fmt.Fprintf(&s, " neighbor %s password %s\n", n.name(), n.Password)
		}
		if n.Passive {
			fmt.Fprintf(&s, " neighbor %s passive\n", n.name())
		}
		if n.BFD {
			fmt.Fprintf(&s, " neighbor %s bfd\n neighbor %s bfd profile fast\n", n.name(), n.name())
		}
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		fmt.Fprintf(&s, " address-family %s unicast\n  maximum-paths 16\n  maximum-paths ibgp 16\n", family)
		for _, n := range c.Neighbors {
			if family == "ipv6" || n.Address.Is4() || n.Interface != "" {
				fmt.Fprintf(&s, "  neighbor %s activate\n", n.name())
			}
			if family == "ipv6" && n.Interface == "" {
				fmt.Fprintf(&s, "  neighbor %s route-map global in\n", n.name())
			}
		}
		s.WriteString(" exit-address-family\n")
	}
	// Of the two next hops of an IPv6 route (RFC 2545), this selects the global one, because tests compare it with the
	// neighbour's address.
	s.WriteString("route-map global permit 10\n set ipv6 next-hop prefer-global\n")
	return s.String()
}

// name returns the neighbour's name for commands.
func (n *Neighbor) name() string {
	if n.Interface != "" {
		return n.Interface
	}
	return n.Address.String()
}

func (f *frr) show(ctx context.Context, h *lab.Host, command string) (string, error) {
	return h.Run(ctx, f.vtysh, "--vty_socket", frrDir, "-c", command)
}

func (f *frr) peers(ctx context.Context, h *lab.Host, _ RouterConfig) (map[netip.Addr]PeerState, error) {
	out, err := h.Run(ctx, f.vtysh, "--vty_socket", frrDir, "-d", "bgpd", "-c", "show bgp neighbors json")
	if err != nil {
		return nil, err
	}
	// vtysh may print messages before the JSON, which has other keys besides the neighbours.
	_, body, _ := strings.Cut(out, "{")
	var raw map[string]json.RawMessage
	if err := json.Unmarshal([]byte("{"+body), &raw); err != nil {
		return nil, fmt.Errorf("read neighbours of host %s: %w\n%s", h, err, out)
	}
	peers := map[netip.Addr]PeerState{}
	for key, value := range raw {
		addr, err := netip.ParseAddr(key)
		if err != nil {
			continue
		}
		var n struct {
			State string `json:"bgpState"`
			Last  string `json:"lastResetDueTo"`
		}
		if err := json.Unmarshal(value, &n); err != nil {
			return nil, fmt.Errorf("read neighbour %s of host %s: %w", addr, h, err)
		}
		peers[addr] = PeerState{Established: n.State == "Established", Info: strings.TrimSpace(n.State + " " + n.Last)}
	}
	return peers, nil
}

func (f *frr) reset(ctx context.Context, h *lab.Host, _ RouterConfig, neighbor netip.Addr) error {
	_, err := f.show(ctx, h, "clear bgp "+neighbor.String())
	return err
}
