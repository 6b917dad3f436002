package metallb

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// yaml returns a MetalLB object.
func yaml(kind, name, spec string) string {
	version := "v1beta1"
	if kind == "BGPPeer" {
		version = "v1beta2"
	}
	text := "---\napiVersion: metallb.io/" + version + "\nkind: " + kind + "\nmetadata: {name: " + name +
		", namespace: metallb-system, labels: {of: " + name + "}}\n"
	if spec != "" {
		text += "spec: {" + spec + "}\n"
	}
	return text
}

func pooled(name, spec string) string {
	return yaml("IPAddressPool", name, "addresses: [192.0.2.0/28]"+spec)
}

const peerOf = "myASN: 64512, peerASN: 64500, peerAddress: 198.51.100.1"

// Each translation is a configuration that Steelyard accepts.
func TestConvert(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(dir, "a.key"), []byte("secret"), 0o600))
	everywhere := yaml("L2Advertisement", "all", "")
	for _, tt := range []struct{ name, from, want string }{
		{"ARP and NDP for all pools", pooled("a", "") + everywhere, `
[l2]

[[pool]]
name = "a"
addresses = ["192.0.2.0/28"]
`},
		{"a list, as kubectl prints", `{"apiVersion": "v1", "kind": "List", "items": [
 {"apiVersion": "metallb.io/v1beta1", "kind": "IPAddressPool", "metadata": {"name": "a"},
  "spec": {"addresses": ["192.0.2.16-192.0.2.31"]}},
 {"apiVersion": "metallb.io/v1beta1", "kind": "L2Advertisement", "metadata": {"name": "b"}}]}`, `
[l2]

[[pool]]
name = "a"
addresses = ["192.0.2.16-192.0.2.31"]
`},
		{"interfaces", pooled("a", "") +
			yaml("L2Advertisement", "b", "interfaces: [eth1, eth0], ipAddressPools: [a]"), `
[l2]
interfaces = ["eth0", "eth1"]

[[pool]]
name = "a"
addresses = ["192.0.2.0/28"]
`},
		{"a pool's properties", everywhere + pooled("a", `, autoAssign: false, avoidBuggyIPs: true,
 serviceAllocation: {priority: 50, namespaces: [blue, green], namespaceSelectors: [{matchLabels: {a: b}}],
 serviceSelectors: [{matchExpressions: [{key: app, operator: In, values: [web]}]}]}`) +
			strings.Replace(pooled("b", ""), "192.0.2.0", "192.0.2.64", 1), `
[l2]

[[pool]]
name = "a"
addresses = ["192.0.2.0/28"]
auto_assign = false
avoid_buggy_ips = true
priority = 50
namespaces = ["blue", "green"]
# MetalLB: IPAddressPool a: namespaceSelectors have no equivalent: list the namespaces in namespaces
service_selector = "app in (web)"

[[pool]]
name = "b"
addresses = ["192.0.2.64/28"]
priority = 51
`},
		{"a peer with everything", pooled("a", "") + yaml("BGPAdvertisement", "b", "") +
			yaml("BFDProfile", "fast", "receiveInterval: 380, transmitInterval: 270, minimumTtl: 250, echoMode: true") +
			yaml("BGPPeer", "a", peerOf+`, peerPort: 1179, holdTime: 30s, keepaliveTime: 5s, connectTime: 5s,
 sourceAddress: 198.51.100.2, vrf: red, ebgpMultiHop: true, bfdProfile: fast, passwordSecret: {name: bgp},
 routerID: 198.51.100.9, nodeSelectors: [{matchLabels: {rack: a}}], enableGracefulRestart: true`), `
[bgp]
asn = 64512

[[bgp.peers]]
address = "198.51.100.1"
asn = 64500
port = 1179
source = "198.51.100.2"
device = "red"
hold_time = "30s"
keepalive = "5s"
connect_retry = "5s"
multihop = 255
password_file = "/etc/steelyard/a.key"
# MetalLB: BGPPeer a: write its password to this file, from the key password of the Secret bgp
# MetalLB: BGPPeer a: set router_id = "198.51.100.9" in [node] of each node that needs it
node_selector = "rack=a"
# MetalLB: BFDProfile fast: echoMode and passiveMode have no equivalent
# MetalLB: BFDProfile fast: one interval is used for both directions: the longer one
bfd = { interval = "380ms", multiplier = 3, multihop = true, min_ttl = 250 }

[[pool]]
name = "a"
addresses = ["192.0.2.0/28"]
`},
		{"peers of different kinds", pooled("a", "") + yaml("BGPAdvertisement", "b", "") +
			yaml("BGPPeer", "a", peerOf) +
			yaml("BGPPeer", "b", "myASN: 64513, dynamicASN: external, interface: eth1, keepaliveTime: 20s") +
			yaml("BGPPeer", "c", strings.Replace(peerOf, "100.1", "100.3", 1)+", holdTime: 9m0s, keepaliveTime: 4m"), `
[bgp]
asn = 64512

[[bgp.peers]]
address = "198.51.100.1"
asn = 64500

[[bgp.peers]]
interface = "eth1"
asn = "external"
local_asn = 64513
hold_time = "1m0s"

[[bgp.peers]]
address = "198.51.100.3"
asn = 64500
hold_time = "9m0s"
# MetalLB: BGPPeer c: keepalives are sent at least three times in the hold time, not every 4m0s

[[pool]]
name = "a"
addresses = ["192.0.2.0/28"]
`},
		{"advertisements with attributes, to some peers", pooled("a", "") +
			strings.Replace(pooled("b", ""), "192.0.2.0", "192.0.2.64", 1) + yaml("BGPPeer", "one", peerOf) +
			yaml("BGPPeer", "two", strings.Replace(peerOf, "100.1", "100.2", 1)) +
			yaml("Community", "names", "communities: [{name: NO_EXPORT, value: '65535:65281'}]") +
			yaml("BGPAdvertisement", "for-a", `ipAddressPools: [a], peers: [one], localPref: 150, aggregationLength: 30,
 communities: [NO_EXPORT, 'large:64512:1:2']`) +
			yaml("BGPAdvertisement", "for-b", `ipAddressPoolSelectors: [{matchLabels: {of: b}}], nodeSelectors: [{}],
 serviceSelectors: [{}]`), `
[bgp]
asn = 64512

[[bgp.peers]]
address = "198.51.100.1"
asn = 64500

[[bgp.peers]]
address = "198.51.100.2"
asn = 64500
pools = ["b"]

[[pool]]
name = "a"
addresses = ["192.0.2.0/28"]
communities = ["64512:1:2", "65535:65281"]
local_pref = 150
aggregate_v4 = 30

[[pool]]
name = "b"
addresses = ["192.0.2.64/28"]
# MetalLB: IPAddressPool b: nodeSelectors of BGPAdvertisement for-b have no equivalent: any node may announce it
# MetalLB: IPAddressPool b: serviceSelectors of BGPAdvertisement for-b have no equivalent: it is for all
`},
		{"a pool for each way", pooled("a", "") + strings.Replace(pooled("b", ""), "192.0.2.0", "192.0.2.64", 1) +
			yaml("BGPPeer", "a", peerOf) + yaml("L2Advertisement", "l", "ipAddressPools: [a]") +
			yaml("BGPAdvertisement", "g", "ipAddressPools: [b]"), `
[l2]

[bgp]
asn = 64512

[[bgp.peers]]
address = "198.51.100.1"
asn = 64500

[[pool]]
name = "a"
addresses = ["192.0.2.0/28"]
announce = ["l2"]

[[pool]]
name = "b"
addresses = ["192.0.2.64/28"]
announce = ["bgp"]
`},
		{"what has no equivalent", pooled("a", ", shape: round, size: 3") + yaml("OSPFInstance", "o", "") +
			yaml("L2Advertisement", "l", `ipAddressPools: [none], nodeSelectors: [{}], serviceSelectors: [{}],
 interfaces: [eth0]`) + "---\n# only a comment\n", `
[l2]
# MetalLB: L2Advertisement l: any node may answer for an address; label nodes that must not with ` +
			`node.kubernetes.io/exclude-from-external-load-balancers
# MetalLB: L2Advertisement l: serviceSelectors have no equivalent: all Services are announced
interfaces = ["eth0"]

[[pool]]
# MetalLB: IPAddressPool a: unknown field "shape" is ignored
# MetalLB: IPAddressPool a: unknown field "size" is ignored
name = "a"
addresses = ["192.0.2.0/28"]
# MetalLB: IPAddressPool a: it has no advertisement, so MetalLB does not announce it; with [bgp] or [l2], Steelyard does
`},
	} {
		text, comments, err := Convert(strings.NewReader(tt.from))
		must.True(t, err == nil, "%s: %v", tt.name, err)
		_, body, _ := strings.Cut(text, "[kubernetes]\n")
		must.Row(t, tt.name, tt.want, body)
		must.Row(t, tt.name+", comments", strings.Count(text, "# MetalLB: "), comments)
		_, err = config.Parse("f", []byte(strings.ReplaceAll(text, "/etc/steelyard/", dir+"/")))
		must.True(t, err == nil, "%s: %v\n%s", tt.name, err, text)
	}
}

func TestConvertErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, from, want string }{
		{"no object", "apiVersion: v1\nkind: Service\n", "no IPAddressPool and no BGPPeer found"},
		{"no YAML", "a: b: c", "document 1: "},
		{"a wrong type", pooled("a", ", autoAssign: 3"), "document 1: IPAddressPool a: "},
		{"a wrong duration", yaml("BGPPeer", "a", peerOf+", holdTime: soon"), "document 1: BGPPeer a: "},
		{"a wrong selector", pooled("a", "") +
			yaml("L2Advertisement", "l", "ipAddressPoolSelectors: [{matchExpressions: [{key: a, operator: Like}]}]"),
			"IPAddressPool a: L2Advertisement l: "},
	} {
		_, _, err := Convert(strings.NewReader(tt.from))
		must.True(t, err != nil && strings.Contains(err.Error(), tt.want), "%s: %v", tt.name, err)
	}
}
