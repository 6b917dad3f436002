package table

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
)

// setVIP updates the entry of a VIP. The entry exists while the VIP has a frontend, and is up while one of them has a
// backend.
func (s *Services) setVIP(addr netip.Addr) error {
	var vip bpf.VIP
	for _, f := range s.vips[addr] {
		if f.up {
			vip.Up = 1
		}
		if f.is.Last != 0 {
			vip.Ranges = 1
		}
	}
	vip.BySource = bpf.Truth(slices.ContainsFunc(s.rules.from, func(p netip.Prefix) bool { return p.Contains(addr) }))
	if len(s.vips[addr]) > 0 {
		return s.objects.SyVips.Put(bpf.ToAddr(addr), vip)
	}
	delete(s.vips, addr)
	return errors.Join(IgnoreMissing(s.objects.SyVips.Delete(bpf.ToAddr(addr))), s.Filter.Remove(addr, bpf.AddrVIP))
}

// ofVIP returns the frontends of a VIP by id.
func (s *Services) ofVIP(addr netip.Addr) map[uint32]*frontend {
	if s.vips[addr] == nil {
		s.vips[addr] = map[uint32]*frontend{}
	}
	return s.vips[addr]
}

// sourceRules are the routing rules that select by the source address.
type sourceRules struct {
	from    []netip.Prefix
	problem string // why they are not followed, or ""; "not read" before FollowRules
}

// FollowRules reads the routing rules again. Replies of backends on this node to a VIP in the source prefix of a rule
// take the route from the VIP. If it returns false, the rules cannot be read or not be followed, and the programs use
// previous ones.
func (s *Services) FollowRules() bool {
	from, err := route.SourceRules()
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if err == nil && s.rules.problem == "" && slices.Equal(from, s.rules.from) {
		return true
	}
	if err == nil {
		s.rules.from = from
		for addr := range s.vips {
			err = errors.Join(err, s.setVIP(addr))
		}
	}
	if text := fmt.Sprint(err); err != nil && text != s.rules.problem {
		s.log.Warn("routing rules not followed", "err", err)
		s.rules.problem = text
	} else if err == nil {
		s.rules.problem = ""
	}
	return err == nil
}
