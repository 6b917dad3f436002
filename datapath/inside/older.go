package inside

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/lb"
)

// older is what another service proxy leaves when this one takes over: connections that connection tracking translates.
type older struct {
	proxy string // the other one, while its rules are in the kernel
	flows int    // at the last count
	held  bool   // natTable is in the kernel
	check bool   // a UDP endpoint has left, or the Services are known
	// ports has the ports of present and deleted Services, because a connection may outlive its Service.
	ports map[prog.ServiceKey]bool
}

// natTable has a chain for each hook at which the kernel translates addresses, and a rule that reads the state of
// connections. The kernel tracks and translates connections only while some table has these, so without them they would
// break when the other proxy's tables are removed.
var natTable = &nftables.Table{Name: "steelyard-hold", Family: nftables.TableFamilyINet}

// holdNAT makes the kernel translate the packets of connections with other tables' translations.
func holdNAT() error {
	return onNFTables(func(c *nftables.Conn) {
		t := c.AddTable(natTable)
		for name, at := range map[string]struct {
			hook     *nftables.ChainHook
			priority *nftables.ChainPriority
		}{
			"prerouting":  {nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest},
			"input":       {nftables.ChainHookInput, nftables.ChainPriorityNATSource},
			"output":      {nftables.ChainHookOutput, nftables.ChainPriorityNATDest},
			"postrouting": {nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource},
		} {
			chain := c.AddChain(&nftables.Chain{
				Name: name, Table: t, Type: nftables.ChainTypeNAT, Hooknum: at.hook, Priority: at.priority,
			})
			c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{
				&expr.Ct{Register: unix.NFT_REG_1, Key: expr.CtKeySTATE},
			}})
		}
	})
}

// holdsNAT reports whether natTable is in the kernel. Another program may have removed it ("nft flush ruleset").
func holdsNAT() (bool, error) {
	c, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("list the nftables tables: %w", err)
	}
	tables, err := c.ListTablesOfFamily(natTable.Family)
	if err != nil {
		return false, fmt.Errorf("list the nftables tables: %w", err)
	}
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == natTable.Name }), nil
}

// releaseNAT undoes holdNAT.
func releaseNAT() error {
	return onNFTables(func(c *nftables.Conn) {
		c.AddTable(natTable) // which need not exist
		c.DelTable(natTable)
	})
}

// onNFTables makes changes in one transaction.
func onNFTables(change func(*nftables.Conn)) error {
	c, err := nftables.New()
	if err == nil {
		change(c)
		err = c.Flush()
	}
	if err != nil {
		return fmt.Errorf("change the nftables table %s: %w", natTable.Name, err)
	}
	return nil
}

// followOlder keeps the connections of another service proxy alive until they have ended.
func (i *Inside) followOlder() error {
	if i.o.Other == nil || i.o.Drain {
		return nil
	}
	proxy, err := i.o.Other()
	if err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.older.proxy = proxy
	if !i.older.held && proxy == "" {
		return nil
	}
	if has, err := holdsNAT(); err != nil {
		return err
	} else if !has {
		if err := holdNAT(); err != nil {
			return err
		}
	}
	i.older.held = true
	if err := i.putRanges(); err != nil {
		return err
	}
	if i.earlier != nil { // which Services there are is not known yet
		return nil
	}
	if err := i.sweepOlder(); err != nil || proxy != "" || i.older.flows > 0 {
		return err
	}
	if err := releaseNAT(); err != nil {
		return err
	}
	i.o.Log.Info("all connections of the other service proxy have ended")
	i.older.held, i.older.ports = false, nil
	return i.putRanges()
}

// sweepOlder counts the connections of another service proxy, and removes UDP flows to endpoints that serve no more.
// The caller holds i.mu.
func (i *Inside) sweepOlder() error {
	if i.older.ports == nil {
		i.older.ports = map[prog.ServiceKey]bool{}
	}
	f := olderFlows{serving: newServing(i.services.at), ports: i.older.ports}
	for k := range f.serving {
		f.ports[k] = true
	}
	i.older.check = false
	var err error
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		_, failed := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, &f)
		err = errors.Join(err, failed)
	}
	if err != nil {
		return fmt.Errorf("read what connection tracking knows: %w", err)
	}
	i.older.flows = f.count
	return nil
}

// checkOlder is sweepOlder if there is a reason.
func (i *Inside) checkOlder() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.older.check {
		return nil
	}
	return i.sweepOlder()
}

// olderFlows selects from the flows of connection tracking.
type olderFlows struct {
	serving serving
	ports   map[prog.ServiceKey]bool // of these and earlier Services
	count   int
}

// MatchConntrackFlow reports whether a flow has to go, and counts the others.
func (f *olderFlows) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	to := ipPort(flow.Forward.DstIP, flow.Forward.DstPort)
	endpoint := ipPort(flow.Reverse.SrcIP, flow.Reverse.SrcPort)
	proto := flow.Forward.Protocol
	if to == endpoint || proto != uint8(lb.TCP) && proto != uint8(lb.UDP) {
		return false
	}
	known := slices.ContainsFunc(portKeys(toEndpoint(to), proto), func(k prog.ServiceKey) bool { return f.ports[k] })
	if !known {
		return false
	}
	if _, serves := f.serving.has(toEndpoint(to), proto, toEndpoint(endpoint)); !serves && proto == uint8(lb.UDP) {
		return true
	}
	f.count++
	return false
}

func ipPort(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}

// State is who serves this node. Its figures are up to half a minute old.
type State struct {
	Other  string // the other service proxy that has rules in the kernel, or ""
	Beside bool   // others may have connections
	Older  int    // how many of them are known
	Flows  int    // of this service proxy
}

// State returns who serves this node.
func (i *Inside) State() State {
	i.mu.Lock()
	defer i.mu.Unlock()
	s := State{Other: i.older.proxy, Beside: i.older.held, Older: i.older.flows}
	if counts := i.flows.counts.Load(); counts != nil {
		s.Flows = ((*counts)[lb.ScopeInside] + (*counts)[lb.ScopeNode]) / 2
	}
	return s
}
