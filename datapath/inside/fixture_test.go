package inside

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// node is a network namespace with programs that count how often they run.
type node struct {
	*lab.Host
	t       testing.TB
	lab     *lab.Lab
	counts  *ebpf.Map // the sum, and by program the sum when it ran last
	entries *ebpf.Map
	uplinks []string
}

const pins = "/sys/fs/bpf/inside" // private to the host

func newNode(t testing.TB) *node {
	l := labtest.New(t)
	n := &node{Host: labtest.Host(t, l, "node"), t: t, lab: l, uplinks: []string{"up0"}}
	table := func(m ebpf.MapSpec) *ebpf.Map {
		made := must.Get(ebpf.NewMap(&m))(t)
		t.Cleanup(func() { made.Close() })
		return made
	}
	n.counts = table(ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8 * slots, MaxEntries: 1})
	n.entries = table(ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 12, MaxEntries: 1024})
	return n
}

// The programs of a test, by their slot in counts.
const (
	slotIn = iota + 1
	slotOut
	slotFirst
	slotSecond
	slots
)

// program returns a program that counts in a slot and lets the next one run.
func (n *node) program(name string, slot int) *ebpf.Program {
	n.t.Helper()
	p := must.Get(ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.SchedCLS, Instructions: asm.Instructions{
		asm.LoadMapValue(asm.R1, n.counts.FD(), 0),
		asm.LoadMem(asm.R2, asm.R1, 0, asm.DWord),
		asm.Add.Imm(asm.R2, 1),
		asm.StoreMem(asm.R1, 0, asm.R2, asm.DWord),
		asm.StoreMem(asm.R1, int16(8*slot), asm.R2, asm.DWord),
		asm.Mov.Imm(asm.R0, -1),
		asm.Return(),
	}}))(n.t)
	n.t.Cleanup(func() { p.Close() })
	return p
}

// ran returns the sum when the program of a slot ran last, or 0.
func (n *node) ran(slot int) uint64 {
	n.t.Helper()
	var v [slots]uint64
	must.Do(n.t, n.counts.Lookup(uint32(0), &v))
	return v[slot]
}

// devices returns new programs for the node's interfaces, as a new agent.
func (n *node) devices(changed func()) *devices {
	return newDevices(deviceOptions{
		in: n.program("in", slotIn), out: n.program("out", slotOut), devices: n.entries, pins: pins,
		uplinks: func() []string { return n.uplinks }, log: slog.New(slog.DiscardHandler), changed: changed,
	})
}

// do runs f in the namespace.
func (n *node) do(f func() error) {
	n.t.Helper()
	must.Do(n.t, n.Do(f))
}

// sh runs a command in the namespace, and returns its output.
func (n *node) sh(format string, args ...any) string {
	n.t.Helper()
	words := strings.Fields(fmt.Sprintf(format, args...))
	return must.Get(n.Run(context.Background(), words[0], words[1:]...))(n.t)
}

// pod adds a pod in its own namespace behind an interface.
func (n *node) pod(name string) *lab.Host {
	n.t.Helper()
	h := labtest.Host(n.t, n.lab, name)
	must.Do(n.t, n.lab.Link(lab.End{Host: n.Host, Name: name}, lab.End{Host: h, Name: "eth0"}, lab.LinkOptions{}))
	return h
}

// link returns an interface, which must exist.
func (n *node) link(name string) (l netlink.Link) {
	n.t.Helper()
	n.do(func() (err error) { l, err = netlink.LinkByName(name); return err })
	return l
}

// entry returns the entry of an interface; its kind is 0 if there is none.
func (n *node) entry(index int) (e prog.Device) {
	n.t.Helper()
	if err := n.entries.Lookup(uint32(index), &e); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		n.t.Error(err)
	}
	return e
}

// entryCount returns the number of entries.
func (n *node) entryCount() (count int) {
	var index uint32
	var e prog.Device
	for all := n.entries.Iterate(); all.Next(&index, &e); {
		count++
	}
	return count
}

// send sends a UDP datagram from the namespace.
func (n *node) send(to string) {
	n.t.Helper()
	c := must.Get(n.DialFrom(n.t.Context(), netip.AddrPort{}, "udp", to))(n.t)
	defer c.Close()
	must.Get(c.Write([]byte("x")))(n.t)
}
