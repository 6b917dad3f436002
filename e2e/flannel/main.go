// Flannel connects a node's pods to those of other nodes by VXLAN, with flannel's packages and what flannel's own
// program calls. That program also contains backends for clouds, whose modules cannot be verified.
//
// Its arguments are those of flannel's manifest: the configuration of the network, a kubeconfig, the file for the CNI
// plugin, and the interface to the other nodes. NODE_NAME is the Node's name.
package main

import (
	"context"
	"flag"
	"log"
	"math/big"
	"os"
	"sync"

	"github.com/flannel-io/flannel/pkg/backend"
	_ "github.com/flannel-io/flannel/pkg/backend/vxlan"
	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/ipmatch"
	"github.com/flannel-io/flannel/pkg/subnet"
	"github.com/flannel-io/flannel/pkg/subnet/kube"
	"github.com/flannel-io/flannel/pkg/trafficmngr/iptables"
)

// resync is the interval at which flannel restores its rules, in seconds (the default of --iptables-resync).
const resync = 5

func main() {
	config := flag.String("net-config-path", "", "")
	kubeconfig := flag.String("kubeconfig-file", "", "")
	file := flag.String("subnet-file", "", "")
	iface := flag.String("iface", "", "")
	flag.Parse()
	if err := run(context.Background(), *config, *kubeconfig, *file, *iface); err != nil {
		log.Fatal(err)
	}
	os.Exit(0)
}

// run is flannel with --kube-subnet-mgr and --ip-masq.
func run(ctx context.Context, config, kubeconfig, file, iface string) error {
	sm, err := kube.NewSubnetManager(ctx, "", kubeconfig, "flannel.alpha.coreos.com", config, false)
	if err != nil {
		return err
	}
	c, err := sm.GetNetworkConfig(ctx)
	if err != nil {
		return err
	}
	stack, err := ipmatch.GetIPFamily(c.EnableIPv4, c.EnableIPv6)
	if err != nil {
		return err
	}
	external, err := ipmatch.LookupExtIface(iface, "", "", stack, ipmatch.PublicIPOpts{})
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	b, err := backend.NewManager(ctx, sm, external).GetBackend(c.BackendType)
	if err != nil {
		return err
	}
	network, err := b.RegisterNetwork(ctx, &group, c)
	if err != nil {
		return err
	}
	if err := protect(ctx, &group, c, network); err != nil {
		return err
	}
	l := network.Lease()
	if err := sm.HandleSubnetFile(file, c, true, l.Subnet, l.IPv6Subnet, network.MTU()); err != nil {
		return err
	}
	if err := sm.CompleteLease(ctx, l, &group); err != nil {
		return err
	}
	network.Run(ctx)
	return nil
}

// protect keeps flannel's rules: packets that leave the pods' network are masqueraded.
func protect(ctx context.Context, group *sync.WaitGroup, c *subnet.Config, network backend.Network) error {
	var rules iptables.IPTablesManager
	if err := rules.Init(ctx, group); err != nil {
		return err
	}
	none := ip.IP6Net{IP: (*ip.IP6)(big.NewInt(0))}
	err := rules.SetupAndEnsureMasqRules(ctx, c.Network, ip.IP4Net{}, ip.IP4Net{}, c.IPv6Network, none, none,
		network.Lease(), resync)
	rules.SetupAndEnsureForwardRules(ctx, c.Network, c.IPv6Network, resync)
	return err
}
