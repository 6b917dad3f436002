package cli

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/systemd"
)

func (e *env) manifest() *ucli.Command {
	return &ucli.Command{
		Name: "manifest", Usage: "print the Kubernetes objects that run the agent on every node",
		Flags: []ucli.Flag{
			&ucli.StringFlag{Name: "image", Value: image + ":" + version, Usage: "run the agent from `IMAGE`"},
			&ucli.BoolFlag{Name: "l2", Usage: "announce by ARP and NDP"},
			&ucli.StringFlag{
				Name: "bgp", Usage: "announce by BGP to `asn=OWN,peer=ADDRESS:ASN`; peer= may be repeated",
			},
			&ucli.StringSliceFlag{
				Name:  "pool",
				Usage: "assign addresses from `RANGE`: a prefix, FIRST-LAST, or node, the nodes' own; may be repeated",
			},
			&ucli.BoolFlag{
				Name: "cleanup", Usage: "print the cleanup objects instead; apply them after deleting the others",
			},
		},
		Action: e.printManifest,
	}
}

func (e *env) printManifest(c *ucli.Context) error {
	configuration, pools, err := firstConfiguration(c.Bool("l2"), c.String("bgp"), c.StringSlice("pool"))
	if err != nil {
		return err
	}
	text := systemd.Manifest(c.String("image"), configuration, pools...)
	if c.Bool("cleanup") {
		if configuration != "" {
			return fmt.Errorf("%w: --cleanup takes no configuration", errUsage)
		}
		text = systemd.CleanupManifest(c.String("image"))
	}
	_, err = fmt.Fprint(e.out, text)
	return err
}

// poolOfNodes is the value of --pool for the nodes' own addresses.
const poolOfNodes = "node"

// nodesLines precede the pools if one has the nodes' own addresses. They belong to the section [kubernetes].
const nodesLines = `proxy = "replace"
# api_servers = ["192.0.2.1:6443"] # needed without kube-proxy

`

// firstConfiguration returns the configuration lines for a first try, which say how to announce addresses and which
// ones, and the addresses: none if they include the nodes', which are not known. It refuses what the agent would
// refuse, and settings that would announce nothing.
func firstConfiguration(l2 bool, bgp string, pools []string) (lines string, addrs []netip.Prefix, err error) {
	if !l2 && bgp == "" && len(pools) == 0 {
		return "", nil, nil
	}
	nodes := slices.Contains(pools, poolOfNodes)
	ranges := slices.DeleteFunc(slices.Clone(pools), func(p string) bool { return p == poolOfNodes })
	announced := l2 || bgp != ""
	if announced != (len(ranges) > 0) {
		return "", nil, fmt.Errorf("%w: announcing addresses needs --l2 or --bgp, and --pool with a range", errUsage)
	}
	text := ""
	if nodes {
		text = nodesLines
	}
	if l2 {
		text += "[l2]\n\n"
	}
	if bgp != "" {
		lines, err := bgpLines(bgp)
		if err != nil {
			return "", nil, fmt.Errorf("%w: --bgp %s: %w", errUsage, bgp, err)
		}
		text += lines
	}
	if len(ranges) > 0 {
		text += poolLines("public", ranges)
	}
	if nodes {
		text += poolLines("nodes", []string{poolOfNodes})
	}
	c, err := config.Parse("manifest", []byte("[kubernetes]\nallocate = false\n\n"+text))
	if err != nil {
		return "", nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	for _, r := range c.Pools[0].Ranges {
		addrs = append(addrs, r.Prefixes()...)
	}
	if nodes {
		addrs = nil
	}
	return text, addrs, nil
}

func poolLines(name string, addresses []string) string {
	var quoted []string
	for _, a := range addresses {
		quoted = append(quoted, strconv.Quote(a))
	}
	return fmt.Sprintf("[[pool]]\nname = %q\naddresses = [%s]\n", name, strings.Join(quoted, ", "))
}

// bgpLines returns the section for "asn=64512,peer=192.0.2.1:64500,peer=[2001:db8::1]:64500".
func bgpLines(flag string) (string, error) {
	var own string
	var peers []string
	for part := range strings.SplitSeq(flag, ",") {
		key, value, _ := strings.Cut(part, "=")
		switch key {
		case "asn":
			own = value
		case "peer":
			i := strings.LastIndex(value, ":")
			address, err := netip.ParseAddr(strings.Trim(value[:max(i, 0)], "[]"))
			if err != nil {
				return "", fmt.Errorf("peer %q is not ADDRESS:ASN, such as 192.0.2.1:64500", value)
			}
			if _, err := strconv.ParseUint(value[i+1:], 10, 32); err != nil {
				return "", fmt.Errorf("peer %q has no AS number after the address", value)
			}
			peers = append(peers, fmt.Sprintf("{ address = %q, asn = %s }", address, value[i+1:]))
		default:
			return "", fmt.Errorf("%q is neither asn=NUMBER nor peer=ADDRESS:ASN", part)
		}
	}
	if _, err := strconv.ParseUint(own, 10, 32); err != nil || len(peers) == 0 {
		return "", fmt.Errorf("asn=NUMBER and at least one peer=ADDRESS:ASN are required")
	}
	return fmt.Sprintf("[bgp]\nasn = %s\npeers = [%s]\n\n", own, strings.Join(peers, ", ")), nil
}
