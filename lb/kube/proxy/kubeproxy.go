package proxy

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// ErrNoTables means that kube-proxy has no nftables tables in this network namespace.
var ErrNoTables = errors.New("there are no tables of kube-proxy in nftables mode")

// KubeProxy returns the rules of kube-proxy in nftables mode (pkg/proxy/nftables/proxier.go) from the kernel. While
// kube-proxy writes, an error or a mixture of old and new rules is possible.
func KubeProxy() (Rules, error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("read the rules of kube-proxy: %w", err)
	}
	defer conn.CloseLasting()
	rules, found := Rules{}, false
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		tables, err := conn.ListTablesOfFamily(family)
		if err != nil {
			return nil, fmt.Errorf("read the rules of kube-proxy: %w", err)
		}
		for _, t := range tables {
			if t.Name != "kube-proxy" {
				continue
			}
			found = true
			r := reader{conn: conn, table: t, endpoints: map[string][]netip.AddrPort{}}
			if err := r.read(rules); err != nil {
				return nil, fmt.Errorf("read the rules of kube-proxy: %w", err)
			}
		}
	}
	if !found {
		return nil, ErrNoTables
	}
	return rules, nil
}

// reader reads the table of one family.
type reader struct {
	conn      *nftables.Conn
	table     *nftables.Table
	endpoints map[string][]netip.AddrPort // by chain, those read so far
}

// read adds the table's rules.
func (r *reader) read(rules Rules) error {
	for _, name := range []string{"service-ips", "service-nodeports"} {
		err := r.each(name, func(to Destination, v verdict, _ string) error {
			rule := Rule{Service: serviceOf(v.chain)}
			var err error
			rule.Inside.Endpoints, rule.Outside.Endpoints, err = r.choices(v.chain)
			rules[to] = rule
			return err
		})
		if err != nil {
			return err
		}
	}
	for _, name := range []string{"no-endpoint-services", "no-endpoint-nodeports"} {
		err := r.each(name, func(to Destination, v verdict, comment string) error {
			empty := Refused
			if v.code == int32(expr.VerdictDrop) {
				empty = Dropped
			}
			rule := rules[to]
			rule.Service = cmp.Or(rule.Service, comment)
			// The destination of a short-circuited connection has changed before this map applies.
			if len(rule.Inside.Endpoints) == 0 {
				rule.Inside.Empty = empty
			}
			rule.Outside.Empty = empty
			rules[to] = rule
			return nil
		})
		if err != nil {
			return err
		}
	}
	// Every connection to a ClusterIP is treated as one from inside.
	clusterIPs, err := r.elements("cluster-ips")
	if err != nil {
		return err
	}
	own := map[netip.Addr]bool{}
	for _, e := range clusterIPs {
		addr, _ := netip.AddrFromSlice(e.Key)
		own[addr] = true
	}
	for to, rule := range rules {
		if own[to.Addr] {
			rule.Outside = Choice{}
			rules[to] = rule
		}
	}
	return nil
}

// each calls f for each element of a verdict map whose key is an address, a protocol and a port, or the last two. The
// comment of an element without a chain is namespace/name:port.
func (r *reader) each(name string, f func(to Destination, v verdict, comment string) error) error {
	elements, err := r.elements(name)
	if err != nil {
		return err
	}
	size := map[nftables.TableFamily]int{nftables.TableFamilyIPv4: 4, nftables.TableFamilyIPv6: 16}[r.table.Family]
	for _, e := range elements {
		key, to := e.Key, Destination{Addr: netip.IPv6Unspecified()}
		if size == 4 {
			to.Addr = netip.IPv4Unspecified()
		}
		if len(key) == size+8 { // each part takes a multiple of four bytes
			to.Addr, _ = netip.AddrFromSlice(key[:size])
			key = key[size:]
		}
		if len(key) != 8 {
			return fmt.Errorf("map %s has a key of %d bytes", name, len(e.Key))
		}
		to.Protocol, to.Port = lb.Protocol(key[0]), binary.BigEndian.Uint16(key[4:])
		v, err := verdictOf(e)
		if err == nil {
			err = f(to, v, e.Comment)
		}
		if err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
	}
	return nil
}

func (r *reader) elements(name string) ([]nftables.SetElement, error) {
	set, err := r.conn.GetSetByName(r.table, name)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", name, err)
	}
	return r.conn.GetSetElements(set)
}

// choices returns the endpoints that a Service's chain chooses from. In the chain for external destinations, rules with
// a condition apply to connections from inside.
func (r *reader) choices(chain string) (inside, outside []netip.AddrPort, err error) {
	if !strings.HasPrefix(chain, "external-") {
		inside, err = r.chosen(chain)
		return inside, inside, err
	}
	rules, err := r.rules(chain)
	if err != nil {
		return nil, nil, err
	}
	short := false
	for _, rule := range rules {
		v, ok := rule[len(rule)-1].(*expr.Verdict)
		if !ok || v.Kind != expr.VerdictGoto {
			continue
		}
		to := &outside
		if len(rule) > 1 {
			to, short = &inside, true
		}
		if *to, err = r.chosen(v.Chain); err != nil {
			return nil, nil, err
		}
	}
	if !short {
		inside = outside
	}
	return inside, outside, nil
}

// chosen returns the endpoints of a chain that chooses one at random.
func (r *reader) chosen(chain string) ([]netip.AddrPort, error) {
	if known, ok := r.endpoints[chain]; ok {
		return known, nil
	}
	rules, err := r.rules(chain)
	if err != nil {
		return nil, err
	}
	all := []netip.AddrPort{}
	for _, rule := range rules {
		for _, e := range rule {
			l, ok := e.(*expr.Lookup)
			if !ok || !l.IsDestRegSet { // not a verdict map
				continue
			}
			elements, err := r.elements(l.SetName)
			if err != nil {
				return nil, err
			}
			for _, e := range elements {
				v, err := verdictOf(e)
				if err != nil {
					return nil, err
				}
				at, err := r.endpoint(v.chain)
				if err != nil {
					return nil, err
				}
				all = append(all, at)
			}
		}
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	all = slices.Compact(all)
	r.endpoints[chain] = all
	return all, nil
}

// endpoint returns the new destination in an endpoint's chain.
func (r *reader) endpoint(chain string) (netip.AddrPort, error) {
	rules, err := r.rules(chain)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var addr netip.Addr
	for _, rule := range rules {
		for _, e := range rule {
			i, ok := e.(*expr.Immediate)
			if !ok {
				continue
			}
			if a, ok := netip.AddrFromSlice(i.Data); ok {
				addr = a
			} else if len(i.Data) == 2 && addr.IsValid() {
				return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(i.Data)), nil
			}
		}
	}
	return netip.AddrPort{}, fmt.Errorf("chain %s has no destination", chain)
}

// rules returns the expressions of each rule of a chain.
func (r *reader) rules(chain string) (all [][]expr.Any, err error) {
	rules, err := r.conn.GetRules(r.table, &nftables.Chain{Name: chain, Table: r.table})
	if err != nil {
		return nil, fmt.Errorf("chain %s: %w", chain, err)
	}
	for _, rule := range rules {
		if len(rule.Exprs) > 0 {
			all = append(all, rule.Exprs)
		}
	}
	return all, nil
}

// serviceOf returns namespace/name:port from the name of a Service's chain: service-HASH-namespace/name/tcp/port.
func serviceOf(chain string) string {
	parts := strings.SplitN(chain, "-", 3)
	names := strings.Split(parts[len(parts)-1], "/")
	if len(names) != 4 {
		return chain
	}
	return NameOf(names[0]+"/"+names[1], names[3])
}

// NameOf returns namespace/name, followed by the port's name if it has one.
func NameOf(service, port string) string {
	if port == "" {
		return service
	}
	return service + ":" + port
}

// verdict is the value of an element of a verdict map.
type verdict struct {
	code  int32
	chain string
}

// verdictOf decodes struct nft_verdict, which the library returns as received.
func verdictOf(e nftables.SetElement) (v verdict, err error) {
	d, err := netlink.NewAttributeDecoder(e.Val)
	if err != nil {
		return v, fmt.Errorf("verdict: %w", err)
	}
	d.ByteOrder = binary.BigEndian
	for d.Next() {
		switch d.Type() {
		case unix.NFTA_VERDICT_CODE:
			v.code = d.Int32()
		case unix.NFTA_VERDICT_CHAIN:
			v.chain = d.String()
		}
	}
	return v, d.Err()
}
