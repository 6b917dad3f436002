package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Environment is what a cluster has beside the agent.
type Environment struct {
	// Proxy is kube-proxy's mode: NFTables, IPTables, or empty for no kube-proxy.
	Proxy string
	CNI   CNI
}

// kube-proxy's modes.
const NFTables, IPTables = "nftables", "iptables"

// String returns a name such as "nftables/bridge".
func (e Environment) String() string {
	if e.Proxy == "" {
		return "replace/" + string(e.CNI)
	}
	return e.Proxy + "/" + string(e.CNI)
}

// CNI is the way a node connects its pods.
type CNI string

const (
	// PTP connects each pod to the node with its own pair of interfaces. Routing within a node then needs no
	// br_netfilter. The lab adds the routes to other nodes.
	PTP CNI = "ptp"
	// Bridge connects the pods of a node by a bridge and masquerades what leaves it, even to pods on other nodes. The
	// lab adds the routes to other nodes.
	Bridge CNI = "bridge"
	// Flannel connects the pods of a node by a bridge, and nodes by VXLAN. It masquerades what leaves the network of
	// all pods.
	Flannel CNI = "flannel"
)

// conf returns the configuration of the CNI plugin. Without a prefix the plugin is never called, because all pods use
// the host network. mtu may be zero.
func (c CNI) conf(pods []netip.Prefix, mtu int) (string, error) {
	ipam := map[string]any{"type": "host-local", "dataDir": kubeletDir + "/cni-addresses"}
	var ranges, routes []any
	for _, p := range pods {
		ranges = append(ranges, []any{map[string]any{"subnet": p}})
		all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if p.Addr().Is6() {
			all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		routes = append(routes, map[string]any{"dst": all})
	}
	ipam["ranges"], ipam["routes"] = ranges, routes
	plugin := map[string]any{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipam": ipam}
	switch c {
	case Bridge:
		plugin["ipMasq"] = true
	case Flannel:
		plugin["mtu"] = mtu
	default:
		plugin = map[string]any{"type": "ptp", "ipMasq": false, "ipam": ipam}
	}
	b, err := json.Marshal(map[string]any{"cniVersion": "0.4.0", "name": "lab", "plugins": []any{plugin}})
	return string(b), err
}

// The files of flannel and the CNI plugin on a node.
const (
	cniConf       = kubeletDir + "/cni/lab.conflist"
	flannelSubnet = kubeletDir + "/flannel.env"
	flannelConfig = kubeletDir + "/flannel.json"
)

// StartFlannel starts flannel in dir on a node whose kubelet runs and whose Node has prefixes for pods. As its CNI
// plugin does, it configures the bridge plugin once flannel has written its file.
func (c *ControlPlane) StartFlannel(ctx context.Context, n lab.Node, dir string) (*lab.Process, error) {
	ranges := strings.Split(PodRanges, ",")
	config := fmt.Sprintf(`{"Network": %q, "EnableIPv6": true, "IPv6Network": %q, "Backend": {"Type": "vxlan"}}`,
		ranges[0], ranges[1])
	if err := n.WriteFile(flannelConfig, config, 0o600); err != nil {
		return nil, err
	}
	p, err := n.Start(lab.Command{
		Abrupt: true, Path: filepath.Join(dir, "flannel"), Env: []string{"NODE_NAME=" + n.Name()},
		Args: []string{
			"--net-config-path=" + flannelConfig, "--kubeconfig-file=" + kubeletDir + "/kubeconfig",
			"--subnet-file=" + flannelSubnet, "--iface=eth0",
		},
	})
	if err != nil {
		return nil, err
	}
	var env string
	_, err = lab.Until(ctx, 60*time.Second, "flannel has a subnet", func() (err error) {
		if env, err = n.ReadFile(flannelSubnet); err != nil && !p.Running() {
			return lab.Permanent(fmt.Errorf("flannel ended: %s", p.Log.Tail(5)))
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, p.Log.Tail(20))
	}
	conf, err := flannelConf(env)
	if err != nil {
		return nil, err
	}
	return p, n.WriteFile(cniConf, conf, 0o600)
}

// flannelConf returns the plugin's configuration for the file that flannel has written.
func flannelConf(env string) (string, error) {
	var pods []netip.Prefix
	mtu := 0
	for line := range strings.Lines(env) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		var err error
		switch name {
		case "FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET":
			var p netip.Prefix
			p, err = netip.ParsePrefix(value)
			pods = append(pods, p.Masked())
		case "FLANNEL_MTU":
			mtu, err = strconv.Atoi(value)
		}
		if err != nil {
			return "", fmt.Errorf("%s: %w", flannelSubnet, err)
		}
	}
	return Flannel.conf(pods, mtu)
}

// FlannelAvailable returns an error if flannel is missing in dir.
func FlannelAvailable(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, "flannel")); err != nil {
		return fmt.Errorf("%w; build it with: make environments", err)
	}
	return nil
}
