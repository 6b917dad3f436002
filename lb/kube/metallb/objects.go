package metallb

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	strictjson "sigs.k8s.io/json"
)

// objects holds what the files contain, by kind.
type objects struct {
	pools       []named[pool]
	l2          []named[l2Advertisement]
	bgp         []named[bgpAdvertisement]
	peers       []named[peer]
	profiles    map[string]named[bfdProfile]
	communities map[string]string // value by alias
	notes       []string          // about objects that are not translated
}

// named is an object with what its fields lack an equivalent for.
type named[T any] struct {
	name   string
	labels map[string]string
	spec   T
	notes  []string
}

type pool struct {
	Addresses         []string `json:"addresses"`
	AutoAssign        *bool    `json:"autoAssign"`
	AvoidBuggyIPs     bool     `json:"avoidBuggyIPs"`
	ServiceAllocation struct {
		Priority           int                  `json:"priority"`
		Namespaces         []string             `json:"namespaces"`
		NamespaceSelectors []meta.LabelSelector `json:"namespaceSelectors"`
		ServiceSelectors   []meta.LabelSelector `json:"serviceSelectors"`
	} `json:"serviceAllocation"`
}

// selection says which pools an advertisement is for. If both lists are empty, it is for all.
type selection struct {
	Pools     []string             `json:"ipAddressPools"`
	Selectors []meta.LabelSelector `json:"ipAddressPoolSelectors"`
}

type l2Advertisement struct {
	selection
	Nodes      []meta.LabelSelector `json:"nodeSelectors"`
	Interfaces []string             `json:"interfaces"`
	Services   []meta.LabelSelector `json:"serviceSelectors"`
	Preferred  []json.RawMessage    `json:"preferredNodeSelectors"`
}

type bgpAdvertisement struct {
	selection
	Nodes             []meta.LabelSelector `json:"nodeSelectors"`
	Services          []meta.LabelSelector `json:"serviceSelectors"`
	AggregationLength int                  `json:"aggregationLength"`
	AggregationV6     int                  `json:"aggregationLengthV6"`
	LocalPref         uint32               `json:"localPref"`
	Communities       []string             `json:"communities"`
	Peers             []string             `json:"peers"`
}

type peer struct {
	MyASN         uint32               `json:"myASN"`
	ASN           uint32               `json:"peerASN"`
	DynamicASN    string               `json:"dynamicASN"`
	LocalASN      uint32               `json:"localASN"`
	Address       string               `json:"peerAddress"`
	Interface     string               `json:"interface"`
	Source        string               `json:"sourceAddress"`
	Port          int                  `json:"peerPort"`
	HoldTime      *meta.Duration       `json:"holdTime"`
	KeepaliveTime meta.Duration        `json:"keepaliveTime"`
	ConnectTime   meta.Duration        `json:"connectTime"`
	RouterID      string               `json:"routerID"`
	Nodes         []meta.LabelSelector `json:"nodeSelectors"`
	Password      string               `json:"password"`
	Secret        struct {
		Name string `json:"name"`
	} `json:"passwordSecret"`
	BFDProfile      string `json:"bfdProfile"`
	GracefulRestart bool   `json:"enableGracefulRestart"`
	Multihop        bool   `json:"ebgpMultiHop"`
	VRF             string `json:"vrf"`
	// Ours announces both families over each session.
	DisableMP bool `json:"disableMP"`
	DualStack bool `json:"dualStackAddressFamily"`
}

type bfdProfile struct {
	Receive    int  `json:"receiveInterval"`
	Transmit   int  `json:"transmitInterval"`
	Multiplier int  `json:"detectMultiplier"`
	Echo       int  `json:"echoInterval"`
	EchoMode   bool `json:"echoMode"`
	Passive    bool `json:"passiveMode"`
	MinimumTTL int  `json:"minimumTtl"`
}

type community struct {
	Communities []struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	} `json:"communities"`
}

// object is any Kubernetes object, or a list.
type object struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   meta.ObjectMeta   `json:"metadata"`
	Spec       json.RawMessage   `json:"spec"`
	Items      []json.RawMessage `json:"items"`
}

// read adds the objects of a YAML or JSON stream.
func (o *objects) read(r io.Reader) error {
	documents := yamlutil.NewYAMLReader(bufio.NewReader(r))
	for i := 1; ; i++ {
		text, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			text, err = yamlutil.ToJSON(text)
		}
		if err == nil {
			err = o.add(text)
		}
		if err != nil {
			return fmt.Errorf("document %d: %w", i, err)
		}
	}
}

// add adds an object, or the objects of a list.
func (o *objects) add(text []byte) error {
	var x object
	if string(bytes.TrimSpace(text)) == "null" {
		return nil // a document with comments only
	}
	if err := json.Unmarshal(text, &x); err != nil {
		return err
	}
	for _, item := range x.Items {
		if err := o.add(item); err != nil {
			return err
		}
	}
	if !strings.HasPrefix(x.APIVersion, "metallb.io/") {
		return nil
	}
	if len(x.Spec) == 0 {
		x.Spec = []byte("{}")
	}
	var err error
	switch x.Kind {
	case "IPAddressPool":
		o.pools, err = appendTo(o.pools, x)
	case "L2Advertisement":
		o.l2, err = appendTo(o.l2, x)
	case "BGPAdvertisement":
		o.bgp, err = appendTo(o.bgp, x)
	case "BGPPeer":
		o.peers, err = appendTo(o.peers, x)
	case "BFDProfile":
		var list []named[bfdProfile]
		if list, err = appendTo(list, x); err == nil {
			o.profiles[x.Metadata.Name] = list[0]
		}
	case "Community":
		var list []named[community]
		if list, err = appendTo(list, x); err == nil {
			for _, c := range list[0].spec.Communities {
				o.communities[c.Name] = c.Value
			}
		}
	case "ConfigurationState", "ServiceL2Status", "ServiceBGPStatus": // only report
	default:
		o.notes = append(o.notes, fmt.Sprintf("%s %s is not translated: its kind is unknown", x.Kind, x.Metadata.Name))
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", x.Kind, x.Metadata.Name, err)
	}
	return nil
}

// appendTo decodes an object. A field that T does not have becomes a note.
func appendTo[T any](list []named[T], x object) ([]named[T], error) {
	n := named[T]{name: x.Metadata.Name, labels: x.Metadata.Labels}
	unknown, err := strictjson.UnmarshalStrict(x.Spec, &n.spec)
	for _, u := range unknown {
		n.notes = append(n.notes, fmt.Sprintf("%v is ignored", u))
	}
	return append(list, n), err
}

// selects reports whether an advertisement is for a pool.
func (s selection) selects(p named[pool]) (bool, error) {
	if len(s.Pools)+len(s.Selectors) == 0 || slices.Contains(s.Pools, p.name) {
		return true, nil
	}
	for _, x := range s.Selectors {
		selector, err := meta.LabelSelectorAsSelector(&x)
		if err != nil {
			return false, err
		}
		if selector.Matches(labels.Set(p.labels)) {
			return true, nil
		}
	}
	return false, nil
}
