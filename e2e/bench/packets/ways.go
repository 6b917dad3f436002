package packets

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
)

// way is a host that forwards packets in one way. The client sends them on a link, and they arrive at its other end or,
// if delivered to pods, in another host.
type way struct {
	name, base string // base: the name of the way that this one is compared with
	vip        netip.Addr
	to         netip.Prefix // where packets arrive
	pods       bool
	prepare    func(*bench, *way) error

	node   *node
	client *lab.Host
	source uint32 // index of the client's interface
	sink   floorObjects
}

// Ways with which others are compared.
const (
	wayTX, wayPodsNFT = "XDP_TX", "nftables DNAT to pods"
	wayNAT, wayNATTC  = "Steelyard nat", "Steelyard nat, tc"
)

func ways() []*way {
	return []*way{
		{name: wayTX, base: wayTX, vip: vipIPIP, to: vips, prepare: prepareTX},
		{name: "plain routing", base: wayTX, vip: vipIPIP, to: vips, prepare: prepareRouting},
		{name: "nftables DNAT", base: wayTX, vip: vipNAT, to: onLink, prepare: prepareNFT},
		{name: "Steelyard ipip", base: wayTX, vip: vipIPIP, to: onLink, prepare: prepareSteelyard(datapath.ModeXDP)},
		{name: "Steelyard gue", base: wayTX, vip: vipGUE, to: onLink, prepare: prepareSteelyard(datapath.ModeXDP)},
		{name: "Steelyard dsr", base: wayTX, vip: vipDSR, to: vips, prepare: prepareSteelyard(datapath.ModeXDP)},
		{name: wayNAT, base: wayTX, vip: vipNAT, to: onLink, prepare: prepareSteelyard(datapath.ModeXDP)},
		{name: wayNATTC, base: wayTX, vip: vipNAT, to: onLink, prepare: prepareSteelyard(datapath.ModeTC)},
		{name: "Steelyard nat, another client traced", base: wayNAT, vip: vipNAT, to: onLink,
			prepare: prepareTraced(datapath.ModeXDP)},
		{name: "Steelyard nat, tc, another client traced", base: wayNATTC, vip: vipNAT, to: onLink,
			prepare: prepareTraced(datapath.ModeTC)},
		{name: wayPodsNFT, base: wayPodsNFT, vip: vipLocal, to: pods, pods: true, prepare: prepareNFT},
		{name: "Steelyard to pods, XDP and tc", base: wayPodsNFT, vip: vipLocal, to: pods, pods: true,
			prepare: prepareDelivery(datapath.ModeXDP)},
		{name: "Steelyard to pods, tc", base: wayPodsNFT, vip: vipLocal, to: pods, pods: true,
			prepare: prepareDelivery(datapath.ModeTC)},
	}
}

// build creates the hosts.
func (w *way) build(b *bench) error {
	h, err := b.lab.Host("node")
	if err != nil {
		return err
	}
	if w.client, err = b.lab.Host("client"); err != nil {
		return err
	}
	w.node = &node{host: h}
	b.nodes["live "+w.name] = w.node
	err = b.lab.Link(lab.End{Host: h, Name: uplink}, lab.End{Host: w.client, Name: uplink},
		lab.LinkOptions{SoftwareChecksums: true})
	if err != nil {
		return err
	}
	err = errors.Join(setMAC(h, uplink, macSelf), setMAC(w.client, uplink, macOther), w.node.configure())
	if err != nil {
		return err
	}
	if w.source, err = indexOf(w.client, uplink); err != nil {
		return err
	}
	end := w.client
	if w.pods {
		if end, err = w.addPods(b); err != nil {
			return err
		}
	}
	if err := loadFloorObjects(&w.sink, nil); err != nil {
		return err
	}
	if err := attachXDP(end, w.sink.Sink); err != nil {
		return err
	}
	// The client's interface receives XDP frames only with a program or with GRO, which SoftwareChecksums turns on.
	return w.prepare(b, w)
}

// addPods adds the pods' host.
func (w *way) addPods(b *bench) (*lab.Host, error) {
	h, err := b.lab.Host("pods")
	if err != nil {
		return nil, err
	}
	err = b.lab.Link(lab.End{Host: w.node.host, Name: "pods"}, lab.End{Host: h, Name: uplink}, lab.LinkOptions{})
	if err != nil {
		return nil, err
	}
	if err := setMAC(h, uplink, macOther); err != nil {
		return nil, err
	}
	if err := w.node.host.AddAddress("pods", netip.PrefixFrom(pod(253), 24)); err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for i := range few {
		addrs = append(addrs, pod(i))
	}
	return h, addNeighbours(w.node.host, "pods", macOther, addrs...)
}

// attachXDP attaches a program to a host's uplink until the host is closed.
func attachXDP(h *lab.Host, prog *ebpf.Program) error {
	index, err := indexOf(h, uplink)
	if err != nil {
		return err
	}
	return h.Do(func() error {
		l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: int(index), Flags: link.XDPDriverMode})
		if err != nil {
			return err
		}
		return h.Own(l)
	})
}

func prepareTX(_ *bench, w *way) error { return attachXDP(w.node.host, w.sink.FloorTx) }

func prepareRouting(_ *bench, w *way) error {
	// Packets leave on the interface on which they arrived.
	return errors.Join(w.node.host.Forward(), w.node.host.Sysctl(map[string]string{
		"net.ipv4.conf.all.send_redirects": "0", "net.ipv4.conf.eth0.send_redirects": "0",
	}))
}

// prepareNFT translates destinations like kube-proxy, and also sources unless the servers are the node's pods.
func prepareNFT(b *bench, w *way) error {
	if err := prepareRouting(b, w); err != nil {
		return err
	}
	addr, masquerade := server4, "masquerade"
	if w.pods {
		addr, masquerade = pod, ""
	}
	var to []string
	for i := range few {
		to = append(to, fmt.Sprintf("%d : %s", i, addr(i)))
	}
	rules := fmt.Sprintf(`table ip bench {
	chain pre {
		type nat hook prerouting priority dstnat
		ip daddr %s tcp dport 80 dnat to jhash ip saddr . tcp sport mod %d map { %s }
	}
	chain post {
		type nat hook postrouting priority srcnat
		%s
	}
}
`, w.vip, few, strings.Join(to, ", "), masquerade)
	if err := w.node.host.WriteFile("/run/rules", rules, 0o644); err != nil {
		return err
	}
	_, err := w.node.host.Run(context.Background(), "nft", "-f", "/run/rules")
	return err
}

func prepareSteelyard(mode datapath.Mode) func(*bench, *way) error {
	return func(b *bench, w *way) error {
		n := w.node
		if err := n.open(flows32k, func(o *datapath.Options) { o.Mode = mode }); err != nil {
			return err
		}
		err := n.put(
			service(vipIPIP, lb.MethodTunnel, lb.EncapIPIP, servers(few, server4)...),
			service(vipGUE, lb.MethodTunnel, lb.EncapGUE, servers(few, server4)...),
			service(vipDSR, lb.MethodDSR, "", servers(few, server4)...),
			service(vipNAT, lb.MethodNAT, "", servers(few, server4)...),
		)
		if err != nil || w.vip != vipNAT {
			return err
		}
		in := hooked{hookTC, n.tcIn}
		return b.open(w.name, opening{n: n, there: in, back: in, client: toVIP(w.vip, dptest.TCP), flows: flows32k})
	}
}

// prepareTraced is prepareSteelyard while the packets of another client are traced.
func prepareTraced(mode datapath.Mode) func(*bench, *way) error {
	return func(b *bench, w *way) error {
		if err := prepareSteelyard(mode)(b, w); err != nil {
			return err
		}
		began, ended := make(chan struct{}, 1), make(chan error, 1)
		go func() { // until the node is closed
			ended <- w.node.host.Do(func() error {
				f := lb.TraceFilter{Client: server4(99), VIP: vipNAT}
				return w.node.dp.Trace(context.Background(), f, nil, func([]lb.TraceEvent) error {
					select {
					case began <- struct{}{}:
					default:
					}
					return nil
				})
			})
		}()
		select {
		case <-began:
			return nil
		case err := <-ended:
			return err
		}
	}
}

func prepareDelivery(mode datapath.Mode) func(*bench, *way) error {
	return func(b *bench, w *way) error {
		n := w.node
		err := n.open(flows32k, func(o *datapath.Options) { o.Mode, o.Delivers = mode, true })
		if err != nil {
			return err
		}
		if err := n.put(localService(w.vip)); err != nil {
			return err
		}
		in, out := hooked{hookTC, n.tcIn}, hooked{hookTC, n.tcOut}
		return b.open(w.name, opening{n: n, there: in, back: out, client: toVIP(w.vip, dptest.TCP), flows: flows32k})
	}
}
