package datapath

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

// target is a backend as seen by one frontend.
type target struct{ frontend, backend uint32 }

// endedFlows are the flows of a target that ended when its backend went down: those of generations before this one.
type endedFlows struct {
	before uint32
	since  time.Duration // uptime
}

func (e endedFlows) has(generation uint32) bool { return int32(generation-e.before) < 0 }

// openEnded reads which flows ended under an earlier agent.
func (s *services) openEnded() error {
	var k bpf.MemberKey
	var before uint32
	all := s.objects.SyEnded.Iterate()
	for all.Next(&k, &before) {
		s.ended[target{k.Frontend, k.Backend}] = endedFlows{before, bpf.Uptime()}
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read the flows that ended: %w", err)
	}
	return nil
}

// endDown ends the flows of a frontend to the backends that a plan is the first to list as down: two writes for each,
// however many flows there are. A packet whose flow has another generation than the backend reads sy_ended; so the
// entry is there before the generation changes. Both lists are sorted.
func (s *services) endDown(f *frontend, down []netip.AddrPort) (n int, err error) {
	id := s.flowFrontend(f.is, f.id)
	var done []netip.AddrPort
	for _, at := range down {
		b := s.backends.byAddr[at]
		if _, before := slices.BinarySearchFunc(f.down, at, netip.AddrPort.Compare); b == nil || before {
			done = append(done, at)
			continue
		}
		e := endedFlows{b.generation + 1, bpf.Uptime()}
		if errPut := s.objects.SyEnded.Put(bpf.MemberKey{Frontend: id, Backend: b.id}, e.before); errPut != nil {
			err = errors.Join(err, fmt.Errorf("end the flows to backend %s: %w", at, errPut))
			continue
		}
		s.ended[target{id, b.id}] = e
		b.generation = e.before
		if errWrite := s.backends.write(b); errWrite != nil {
			err = errors.Join(err, errWrite)
			continue
		}
		n++
		done = append(done, at)
	}
	f.down = done
	return n, err
}

// endedFlows returns which flows have ended and may still be in the tables.
func (s *services) endedFlows() map[target]endedFlows {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.ended)
}

// forgetEnded is for flows that a walk has removed, which began at this time. Those that ended shortly before it stay:
// a program that ran at that moment may have moved a flow behind the walk.
func (s *services) forgetEnded(removed map[target]endedFlows, start time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for t, e := range removed {
		if s.ended[t] != e || start-e.since < time.Second {
			continue
		}
		err := ignoreMissing(s.objects.SyEnded.Delete(bpf.MemberKey{Frontend: t.frontend, Backend: t.backend}))
		if err != nil {
			s.log.Warn("entry of ended flows not removed", "err", err)
			continue
		}
		delete(s.ended, t)
	}
}

// mayHaveEnded reports whether flows to a backend that have ended may still be in the tables.
func (s *services) mayHaveEnded() func(backend uint32) bool {
	some := map[uint32]bool{}
	for t := range s.ended {
		some[t.backend] = true
	}
	return func(id uint32) bool { return some[id] }
}

func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}
