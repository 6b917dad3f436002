package inside

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/bits"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/lb"
)

// services keeps the maps of rules. A list of endpoints never changes: a change writes another list, then refers to it,
// and removes the old one later. So hardly any packet sees a part of a change.
type services struct {
	maps    *prog.Objects
	given   map[string][]lb.NodeRule   // by Service, as far as it is complete
	rules   map[string][]*entry        // by Service
	at      map[prog.ServiceKey]*entry // which Service has an address and port
	groups  map[uint32]string          // name of a Service's port, and its family
	members map[string]int             // number of entries by name
	allowed map[prog.AllowKey]bool     // as written
	addrs   map[netip.Addr]*address
	touched map[netip.Addr]bool // addresses that addrs has gained or lost since its user last cleared this
	next    uint32              // id of the next list
	retired []retired
}

// entry is one entry of the map of services.
type entry struct {
	name      string
	key       prog.ServiceKey
	value     prog.Service
	endpoints []netip.AddrPort
	serving   []netip.AddrPort // keep their flows
	rule      *lb.NodeRule
	allow     []netip.Prefix
}

// address counts the entries with an address.
type address struct{ entries, cluster, whole int }

func newServices(maps *prog.Objects) (*services, error) {
	s := &services{
		maps: maps, given: map[string][]lb.NodeRule{}, rules: map[string][]*entry{},
		at: map[prog.ServiceKey]*entry{}, groups: map[uint32]string{}, members: map[string]int{},
		allowed: map[prog.AllowKey]bool{}, addrs: map[netip.Addr]*address{}, touched: map[netip.Addr]bool{},
	}
	// The lists of a previous agent stay in use until its services are replaced.
	var key prog.EndpointKey
	var value prog.Endpoint
	all := maps.Endpoints.Iterate()
	for all.Next(&key, &value) {
		s.next = max(s.next, key.List)
	}
	return s, all.Err()
}

// change is a change of one Service.
type change struct {
	service  string
	rules    []lb.NodeRule
	old, now []*entry
	err      error
}

// apply replaces the rules of the Services in changed, or of all. It returns the endpoints that have left. What
// fails is tried again when the Service is given again. All entries are written before any is removed, because another
// Service may take an address and port.
func (s *services) apply(changed map[string][]lb.NodeRule, all bool) (left []gone, err error) {
	var changes []*change
	add := func(service string, rules []lb.NodeRule) {
		given, complete := s.given[service]
		if complete && reflect.DeepEqual(given, rules) || !complete && len(rules)+len(s.rules[service]) == 0 {
			return
		}
		delete(s.given, service)
		changes = append(changes, &change{service: service, rules: rules, old: s.rules[service]})
	}
	for _, service := range slices.Sorted(maps.Keys(changed)) { // so that ids of groups do not depend on chance
		add(service, changed[service])
	}
	if all {
		for service := range s.rules {
			if _, stays := changed[service]; !stays {
				add(service, nil)
			}
		}
	}
	for _, c := range changes {
		c.err = s.put(c)
		err = errors.Join(err, c.err)
	}
	for _, c := range changes {
		if c.err == nil {
			err = errors.Join(err, s.clear(c, &left))
		}
	}
	if all && err == nil {
		err = s.removeOthers()
	}
	return left, err
}

// put writes the new entries of a Service.
func (s *services) put(c *change) error {
	lists := map[string]uint32{} // of this Service, by content
	for _, e := range c.old {
		if e.value.List != 0 {
			lists[content(e)] = e.value.List
		}
	}
	for _, e := range entries(c.rules) {
		e.value.Group = s.group(e.name)
		c.now = append(c.now, e)
		s.count(e, 1)
		if err := s.putEntry(e, lists); err != nil {
			s.rules[c.service] = append(c.old, c.now...) // all of them are replaced the next time
			return fmt.Errorf("put %s: %w", e.name, err)
		}
	}
	return nil
}

func (s *services) putEntry(e *entry, lists map[string]uint32) error {
	if len(e.endpoints) > 0 {
		list, written := lists[content(e)]
		if !written {
			s.next++
			list = s.next
			if err := s.write(list, e); err != nil {
				s.retire(list, e)
				return err
			}
			lists[content(e)] = list
		}
		e.value.List = list
	}
	for _, p := range e.allow {
		key := toAllow(e.value.Group, p)
		if s.allowed[key] {
			continue
		}
		if err := s.maps.Allow.Put(key, uint32(1)); err != nil {
			return err
		}
		s.allowed[key] = true
	}
	if err := s.maps.Services.Put(e.key, e.value); err != nil {
		return err
	}
	s.at[e.key] = e
	return nil
}

// clear removes what a Service no longer has.
func (s *services) clear(c *change, left *[]gone) (err error) {
	used, allow := map[uint32]bool{}, map[prog.AllowKey]bool{}
	for _, e := range c.now {
		used[e.value.List] = true
		for _, p := range e.allow {
			allow[toAllow(e.value.Group, p)] = true
		}
	}
	stays := c.now
	for _, e := range c.old {
		if s.at[e.key] == e { // not replaced by another entry, of this Service or of another one
			if failed := ignoreMissing(s.maps.Services.Delete(e.key)); failed != nil {
				err = errors.Join(err, fmt.Errorf("remove %s: %w", e.name, failed))
				stays = append(stays, e)
				continue
			}
			delete(s.at, e.key)
		}
		if e.key.Proto != uint8(lb.SCTP) {
			*left = append(*left, leaving(e, s.at[e.key])...)
		}
		for _, p := range e.allow {
			key := toAllow(e.value.Group, p)
			if allow[key] || !s.allowed[key] {
				continue
			}
			if failed := ignoreMissing(s.maps.Allow.Delete(key)); failed != nil {
				err = errors.Join(err, fmt.Errorf("remove a source of %s: %w", e.name, failed))
				continue
			}
			delete(s.allowed, key)
		}
		s.count(e, -1)
		if !used[e.value.List] {
			used[e.value.List] = true
			s.retire(e.value.List, e)
		}
	}
	if s.rules[c.service] = stays; len(stays) == 0 {
		delete(s.rules, c.service)
	}
	if err == nil && len(c.rules) > 0 {
		s.given[c.service] = c.rules
	}
	return err
}

// gone is an endpoint that no longer serves a port of a Service.
type gone struct {
	key      prog.ServiceKey
	endpoint netip.AddrPort
	ended    bool // its pod has ended
}

// leaving returns the endpoints that old knew and current lacks.
func leaving(old, current *entry) (all []gone) {
	stays, ending := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
	if current != nil { // otherwise nothing is known about pods that were ending
		for _, e := range slices.Concat(current.endpoints, current.serving) {
			stays[e] = true
		}
		for _, e := range old.rule.Ending {
			ending[e] = true
		}
		for _, e := range current.rule.Ending {
			delete(ending, e)
		}
	}
	for _, e := range slices.Concat(old.endpoints, old.serving, old.rule.Ending) {
		if !stays[e] {
			stays[e] = true
			all = append(all, gone{old.key, e, ending[e]})
		}
	}
	return all
}

// content identifies the list that an entry needs. Lists with affinity have members as well.
func content(e *entry) string {
	b := make([]byte, 0, 18*len(e.endpoints)+1)
	for _, at := range e.endpoints {
		a := at.Addr().As16()
		b = binary.BigEndian.AppendUint16(append(b, a[:]...), at.Port())
	}
	return string(append(b, byte(min(e.value.Affinity, 1))))
}

// entries returns the entries of a Service's rules. Their lists and groups have no ids yet.
func entries(rules []lb.NodeRule) (all []*entry) {
	for i := range rules {
		r := &rules[i]
		for scope, c := range map[uint8]*lb.NodeChoice{prog.Inside: &r.Inside, prog.Outside: r.Outside} {
			if c == nil {
				continue
			}
			all = append(all, &entry{
				name: r.Name + " " + lb.FamilyOf(r.Addr).String(), endpoints: c.Endpoints, serving: r.Serving, rule: r,
				allow: ofFamily(r.Allow, r.Addr),
				key: prog.ServiceKey{
					Addr: toAddr(r.Addr), Port: bits.ReverseBytes16(r.Port), Proto: uint8(r.Protocol), Scope: scope,
				},
				value: prog.Service{
					Endpoints: uint32(len(c.Endpoints)), Affinity: uint32(r.Affinity / time.Second),
					Drop: truth(c.Drop), Restricted: truth(r.Allow != nil),
				},
			})
		}
	}
	return all
}

// ofFamily returns the prefixes of an address's family. The programs know IPv4 addresses as IPv6 addresses, of which
// those of the other family may contain all.
func ofFamily(all []netip.Prefix, a netip.Addr) (some []netip.Prefix) {
	for _, p := range all {
		if p.Addr().Is4() == a.Is4() {
			some = append(some, p)
		}
	}
	return some
}

func (s *services) write(list uint32, e *entry) error {
	n := len(e.endpoints)
	keys, values := make([]prog.EndpointKey, n), make([]prog.Endpoint, n)
	members, ones := make([]prog.MemberKey, n), make([]uint32, n)
	for i, at := range e.endpoints {
		keys[i], values[i] = prog.EndpointKey{List: list, Index: uint32(i)}, toEndpoint(at)
		members[i], ones[i] = prog.MemberKey{List: list, Endpoint: values[i]}, 1
	}
	_, err := s.maps.Endpoints.BatchUpdate(keys, values, nil)
	if err == nil && e.value.Affinity > 0 {
		_, err = s.maps.Members.BatchUpdate(members, ones, nil)
	}
	return err
}

// group returns the id of a port of a Service. It is derived from the name, so it stays when the agent restarts.
func (s *services) group(name string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(name))
	id := h.Sum32()
	for s.groups[id] != "" && s.groups[id] != name {
		id++
	}
	s.groups[id] = name
	return id
}

// count adds n to the numbers of entries like e.
func (s *services) count(e *entry, n int) {
	if s.members[e.name] += n; s.members[e.name] == 0 {
		delete(s.members, e.name)
		delete(s.groups, e.value.Group)
	}
	a := s.addrs[e.rule.Addr]
	if a == nil {
		a = &address{}
		s.addrs[e.rule.Addr], s.touched[e.rule.Addr] = a, true
	}
	was := *a
	a.entries += n
	if e.rule.ClusterIP {
		a.cluster += n
	}
	if e.rule.Whole {
		a.whole += n
	}
	if (was.cluster == 0) != (a.cluster == 0) || (was.whole == 0) != (a.whole == 0) {
		s.touched[e.rule.Addr] = true
	}
	if a.entries == 0 {
		delete(s.addrs, e.rule.Addr)
		s.touched[e.rule.Addr] = true
	}
}
