package packets

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
)

// batch is the number of flows that are opened together. It is smaller than the table of half-open flows.
const batch = 8192

// opening opens flows by the packets of both sides. It leaves the addresses that the server sees in recorded.
type opening struct {
	n           *node
	there, back hooked // from the client, and from the server
	client      dptest.Packet
	server      dptest.Packet // its addresses and ports are replaced
	flows       int           // a power of two
	services    int
	recorded    *ebpf.Map
}

// hooked is a program and its hook.
type hooked struct {
	hook string
	prog *ebpf.Program
}

// newRecorded makes a map for the addresses of flows.
func newRecorded(flows int) (*ebpf.Map, error) {
	spec, err := loadWrap()
	if err != nil {
		return nil, err
	}
	m := spec.Maps["recorded"]
	m.MaxEntries = uint32(flows)
	return ebpf.NewMap(m)
}

func (o opening) run() error {
	first, again, back := o.client, o.client, o.server
	if o.client.Proto == dptest.TCP {
		first.Flags, back.Flags, again.Flags = dptest.SYN, dptest.SYN|dptest.ACK, dptest.ACK
		first.Seq, back.Seq, back.Ack, again.Seq, again.Ack = 1000, 5000, 1001, 1001, 5001
	}
	var steps []*wrapper
	for i, p := range []packets{
		{frame: first, vary: varyClient, services: o.services, record: true},
		{frame: back, vary: varyRecorded},
		{frame: again, vary: varyClient, services: o.services},
	} {
		h := o.there
		if i == 1 {
			h = o.back
		}
		w, err := newWrapper(o.n, h.hook, p, o.recorded)
		if err != nil {
			return err
		}
		defer w.objs.Close()
		steps = append(steps, w)
	}
	size := min(batch, o.flows)
	for base := 0; base < o.flows; base += size {
		for i, w := range steps {
			h := o.there
			if i == 1 {
				h = o.back
			}
			err := w.set(flows{uint32(base), uint32(size - 1), strideOpen, uint32(o.flows - 1)})
			if err != nil {
				return err
			}
			// One packet more: what the program made of a packet is recorded before the next one.
			if _, _, _, err := w.run(h.prog, size+1); err != nil {
				return fmt.Errorf("open flows: %w", err)
			}
		}
	}
	return nil
}
