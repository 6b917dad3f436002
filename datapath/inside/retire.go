package inside

import (
	"errors"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
)

// retireAfter is how long the endpoints of a replaced list stay. A program that has read the old id needs them for less
// than a millisecond.
const retireAfter = time.Second

// retired is a list that no entry refers to any more.
type retired struct {
	list      uint32
	endpoints []netip.AddrPort
	members   bool
	after     time.Time
}

// retire makes removeRetired remove a list that an entry had.
func (s *services) retire(list uint32, e *entry) {
	if len(e.endpoints) > 0 {
		s.retired = append(s.retired, retired{list, e.endpoints, e.value.Affinity > 0, time.Now().Add(retireAfter)})
	}
}

// removeRetired removes the lists that were replaced some time before now.
func (s *services) removeRetired(now time.Time) (err error) {
	var later []retired
	for _, r := range s.retired {
		if now.Before(r.after) {
			later = append(later, r)
			continue
		}
		var failed error
		for i, at := range r.endpoints {
			failed = errors.Join(failed,
				ignoreMissing(s.maps.Endpoints.Delete(prog.EndpointKey{List: r.list, Index: uint32(i)})))
			if r.members {
				failed = errors.Join(failed,
					ignoreMissing(s.maps.Members.Delete(prog.MemberKey{List: r.list, Endpoint: toEndpoint(at)})))
			}
		}
		if failed != nil {
			later, err = append(later, r), errors.Join(err, failed)
		}
	}
	s.retired = later
	return err
}

// removeOthers removes what a previous agent left and this one has not written.
func (s *services) removeOthers() error {
	lists := map[uint32]bool{}
	for _, e := range s.at {
		lists[e.value.List] = true
	}
	for _, r := range s.retired {
		lists[r.list] = true
	}
	return errors.Join(
		removeKeys(s.maps.Services, func(k prog.ServiceKey) bool { return s.at[k] == nil }),
		removeKeys(s.maps.Endpoints, func(k prog.EndpointKey) bool { return !lists[k.List] }),
		removeKeys(s.maps.Members, func(k prog.MemberKey) bool { return !lists[k.List] }),
		removeKeys(s.maps.Allow, func(k prog.AllowKey) bool { return !s.allowed[k] }),
	)
}

// removeKeys removes the entries of a map whose key is unwanted.
func removeKeys[K any](m *ebpf.Map, unwanted func(K) bool) error {
	var key K
	var keys []K
	value := make([]byte, m.ValueSize())
	all := m.Iterate()
	for all.Next(&key, &value) {
		if unwanted(key) {
			keys = append(keys, key)
		}
	}
	err := all.Err()
	for _, k := range keys {
		err = errors.Join(err, ignoreMissing(m.Delete(k)))
	}
	return err
}
