package packets

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
)

// batch is the number of flows opened together. It is less than the capacity of the half-open table.
const batch = 8192

// opening opens flows with packets from both sides. It stores the addresses that the server sees in recorded.
type opening struct {
	n           *node
	there, back hooked // for the client's and the server's packets
	client      dptest.Packet
	server      dptest.Packet // its addresses and ports are replaced
	flows       int           // a power of two
	services    int
	recorded    *ebpf.Map
}

type hooked struct {
	hook string
	prog *ebpf.Program
}

// newRecorded creates a map for flows' addresses.
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
			// Run one more packet, because the result for a packet is recorded before the next one.
			if _, _, _, err := w.run(h.prog, size+1); err != nil {
				return fmt.Errorf("open flows: %w", err)
			}
		}
	}
	return nil
}
