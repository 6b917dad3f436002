package datapath

import (
	"fmt"
	"net/netip"
	"sync"

	"github.com/steelyard-lb/steelyard/lb"
)

// probeMark is what the marks of probes begin with (bpf/out.h); the lower half tells them apart.
const probeMark = 0x5359_0000

// probes makes health checks of one-way services go the way of traffic: what has such a mark leaves as a client's packet
// would, to a given server.
type probes struct {
	objects *syObjects
	mu      sync.Mutex // guards marks
	marks   map[probeKey]uint32
}

type probeKey struct {
	server netip.Addr
	method uint8
}

// mark returns the mark of packets that are to go to a server in this way. There are 65,535 of them.
func (p *probes) mark(server netip.Addr, method lb.Method, encap lb.Encap) (uint32, error) {
	word, err := methodWord(method, encap)
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	k := probeKey{server, uint8(word)}
	mark, ok := p.marks[k]
	if !ok {
		if mark = probeMark + uint32(len(p.marks)) + 1; mark > probeMark+0xffff {
			return 0, fmt.Errorf("there are %d probed servers, and no room for more", len(p.marks))
		}
	}
	ours := ourAddressesTowards(server)
	if len(ours) == 0 {
		return 0, fmt.Errorf("no route to %s", server)
	}
	err = p.objects.Probes.Put(mark, syProbe{Addr: toAddr(server), Local: toAddr(ours[0]), Method: uint32(word)})
	if err != nil {
		return 0, fmt.Errorf("put the way of a probe: %w", err)
	}
	p.marks[k] = mark
	return mark, nil
}

// ProbeMark returns the SO_MARK with which a health check to a VIP reaches one server of a service by dsr or tunnel. It asks
// the kernel for the way each time, so it is to be called for each check.
func (d *Datapath) ProbeMark(server netip.Addr, method lb.Method, encap lb.Encap) (uint32, error) {
	return d.probes.mark(server, method, encap)
}
