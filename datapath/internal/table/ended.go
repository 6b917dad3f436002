package table

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Target is a backend of a frontend.
type Target struct{ Frontend, Backend uint32 }

// EndedFlows says which flows of a target ended when its backend went down: those with a generation older than before.
type EndedFlows struct {
	before uint32
	Since  time.Duration // uptime
}

// Has reports whether flows of this generation of the backend have ended.
func (e EndedFlows) Has(generation uint32) bool { return int32(generation-e.before) < 0 }

// openEnded reads which flows ended under a previous agent.
func (s *Services) openEnded() error {
	var k bpf.MemberKey
	var before uint32
	all := s.objects.SyEnded.Iterate()
	for all.Next(&k, &before) {
		s.Ended[Target{k.Frontend, k.Backend}] = EndedFlows{before, bpf.Uptime()}
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read the ended flows: %w", err)
	}
	return nil
}

// endDown ends the frontend's flows to the backends that were not listed as down before. It takes two writes per
// backend, however many flows there are. For a packet whose flow has another generation than its backend, the programs
// read sy_ended, so its entry is written before the generation changes. down and f.down are sorted.
func (s *Services) endDown(f *frontend, down []netip.AddrPort) (n int, err error) {
	id := s.flowFrontend(f.is, f.ID)
	var done []netip.AddrPort
	for _, at := range down {
		b := s.Backends.ByAddr[at]
		if _, before := slices.BinarySearchFunc(f.down, at, netip.AddrPort.Compare); b == nil || before {
			done = append(done, at)
			continue
		}
		e := EndedFlows{b.generation + 1, bpf.Uptime()}
		if errPut := s.objects.SyEnded.Put(bpf.MemberKey{Frontend: id, Backend: b.ID}, e.before); errPut != nil {
			err = errors.Join(err, fmt.Errorf("end the flows to backend %s: %w", at, errPut))
			continue
		}
		s.Ended[Target{id, b.ID}] = e
		b.generation = e.before
		if errWrite := s.Backends.write(b); errWrite != nil {
			err = errors.Join(err, errWrite)
			continue
		}
		n++
		done = append(done, at)
	}
	f.down = done
	return n, err
}

// EndedFlows returns the ended flows that may still be in the tables, by target.
func (s *Services) EndedFlows() map[Target]EndedFlows {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return maps.Clone(s.Ended)
}

// ForgetEnded forgets ended flows that a walk, begun at start, has removed. It keeps flows that ended less than a
// second before start, because a program that was running at that moment may have moved a flow to a table that the walk
// had already visited.
func (s *Services) ForgetEnded(removed map[Target]EndedFlows, start time.Duration) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for t, e := range removed {
		if s.Ended[t] != e || start-e.Since < time.Second {
			continue
		}
		err := IgnoreMissing(s.objects.SyEnded.Delete(bpf.MemberKey{Frontend: t.Frontend, Backend: t.Backend}))
		if err != nil {
			s.log.Warn("entry of ended flows not removed", "err", err)
			continue
		}
		delete(s.Ended, t)
	}
}

// IgnoreMissing returns nil if err says that the key does not exist, and otherwise err.
func IgnoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}
