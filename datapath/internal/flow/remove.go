package flow

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Remover removes NAT flows in batches with the program sy_gc, which deletes an entry only if it still belongs to
// the flow that was read (bpf/gc.h).
type Remover struct {
	program *ebpf.Program
	list    bpf.GCList
	added   int
	Removed int
}

// NewRemover returns a remover for flows that have been idle since before now, or for flows that have ended, which
// it removes even if they still have packets.
func NewRemover(program *ebpf.Program, ended bool, now time.Duration) *Remover {
	return &Remover{program: program, list: bpf.GCList{Ended: uint32(bpf.Truth(ended)), Since: bpf.FlowClock(now)}}
}

// Add removes a flow with the next flush, or at once when the list is full.
func (r *Remover) Add(t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow) error {
	if r.list.Items > 0 && r.list.Table != uint32(t.ID) || int(r.list.Items) == len(r.list.Item) {
		if err := r.Flush(); err != nil {
			return err
		}
	}
	r.list.Table = uint32(t.ID)
	r.list.Item[r.list.Items] = bpf.GCItem{Key: k, Backend: f.Backend, Seen: f.F.Seen, Generation: f.F.Generation}
	r.added++
	r.list.Items++
	return nil
}

// Flush removes the flows of the list.
func (r *Remover) Flush() error {
	if r.list.Items == 0 {
		return nil
	}
	data := unsafe.Slice((*byte)(unsafe.Pointer(&r.list)), unsafe.Sizeof(r.list))
	n, err := r.program.Run(&ebpf.RunOptions{Data: data})
	r.list.Items = 0
	if err != nil {
		return fmt.Errorf("remove flows: %w", err)
	}
	r.Removed += int(n)
	return nil
}
