package inside

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
)

type deviceOptions struct {
	in, out *ebpf.Program   // for both directions of each device
	devices *ebpf.Map       // prog.Device by index
	uplinks func() []string // names of the configured uplinks
	pins    string          // directory in a bpffs for links at tcx
	log     *slog.Logger
	changed func() // called after each Sync and each change of a device; may be nil
	// begin excludes other processes until unlock, or returns why nothing may be changed. It may be nil.
	begin func() (unlock func(), err error)
}

// devices attaches the programs to the interfaces of the calling thread's network namespace.
type devices struct {
	o     deviceOptions
	hooks []program

	mu      sync.Mutex
	states  map[int]deviceState // by index
	entries map[int]prog.Device // content of the map
	masters map[int]netlink.Link
}

// deviceState is what is known about an interface that is served or that has findings.
type deviceState struct {
	name     string
	kind     kind
	mtu      int // 0 while the interface is down
	attached bool
	findings []string
}

func newDevices(o deviceOptions) *devices {
	o.pins = filepath.Join(o.pins, "tcx")
	return &devices{
		o: o, states: map[int]deviceState{}, entries: map[int]prog.Device{}, masters: map[int]netlink.Link{},
		hooks: []program{
			newProgram("sy_inside_in", ebpf.AttachTCXIngress, o.in),
			newProgram("sy_inside_out", ebpf.AttachTCXEgress, o.out),
		},
	}
}

// Sync attaches the programs to all devices that lack them, and removes them where they do not belong.
func (d *devices) Sync() error {
	defer d.hasChanged()
	unlock, err := d.begin()
	if err != nil {
		return err
	}
	defer unlock()
	links, err := whole(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	if err := d.readEntries(); err != nil {
		return err
	}
	clear(d.masters)
	present := map[int]bool{}
	for _, l := range links {
		present[l.Attrs().Index] = true
		if isMaster(l) {
			d.masters[l.Attrs().Index] = l
		}
	}
	var errs []error
	for _, l := range links {
		_, err := d.take(l, true)
		errs = append(errs, err)
	}
	known := slices.AppendSeq(slices.AppendSeq(d.pinned(), maps.Keys(d.entries)), maps.Keys(d.states))
	for _, index := range known {
		if !present[index] {
			errs = append(errs, d.forget(index))
		}
	}
	return errors.Join(errs...)
}

// begin excludes other goroutines and processes until unlock.
func (d *devices) begin() (unlock func(), err error) {
	d.mu.Lock()
	if d.o.begin == nil {
		return d.mu.Unlock, nil
	}
	end, err := d.o.begin()
	if err != nil {
		d.mu.Unlock()
		return nil, err
	}
	return func() { end(); d.mu.Unlock() }, nil
}

// readEntries reads the map, which may have entries of an earlier agent.
func (d *devices) readEntries() error {
	clear(d.entries)
	var index uint32
	var e prog.Device
	all := d.o.devices.Iterate()
	for all.Next(&index, &e) {
		d.entries[int(index)] = e
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read the table of devices: %w", err)
	}
	return nil
}

// pinned returns the indexes of interfaces that have links at tcx.
func (d *devices) pinned() (indexes []int) {
	files, _ := os.ReadDir(d.o.pins) // without a directory there are none
	for _, f := range files {
		var index int
		if _, err := fmt.Sscanf(f.Name(), "%d-", &index); err == nil {
			indexes = append(indexes, index)
		}
	}
	return indexes
}

// take brings the programs and the entry of an interface up to date. Unless verify is set, it trusts that programs that
// it has attached are still there.
func (d *devices) take(l netlink.Link, verify bool) (changed bool, err error) {
	a := l.Attrs()
	was := d.states[a.Index]
	k, bridge := classify(l, d.o.uplinks(), d.masters)
	if k == kindNone {
		return d.leave(l, was)
	}
	now := deviceState{name: a.Name, kind: k, attached: was.attached, findings: was.findings}
	if a.Flags&net.FlagUp != 0 {
		now.mtu = a.MTU
	}
	e := prog.Device{Bridge: uint32(bridge), Kind: uint8(k), Bare: truth(a.EncapType != "ether")}
	if k == kindPod {
		e.Netns = uint32(a.NetNsID + 1) // NetNsID is -1 if the peer is in no other namespace
	}
	if d.entries[a.Index] != e { // first, because the programs need it
		changed = true
		if err = d.o.devices.Put(uint32(a.Index), e); err == nil {
			d.entries[a.Index] = e
		}
	}
	if err == nil && (verify || !was.attached || was.name != now.name || was.kind != k) {
		var others []string
		for _, h := range slices.Backward(d.hooks) { // replies need the program at egress once requests are translated
			names, e := h.attach(l, d.o.pins)
			others, err = append(others, names...), errors.Join(err, e)
		}
		now.attached, now.findings = err == nil, foreign(now, others)
	}
	if err != nil && isGone(a.Index) {
		return changed, nil // the notice that it is gone follows
	}
	if err != nil {
		err = fmt.Errorf("attach to interface %s: %w", a.Name, err)
		now.findings = append(now.findings, fmt.Sprintf("interface %s is not served: %v", a.Name, err))
	}
	d.states[a.Index] = now
	return changed || now.attached != was.attached || now.name != was.name || now.mtu != was.mtu, err
}

// leave removes the programs from an interface that is not ours to serve.
func (d *devices) leave(l netlink.Link, was deviceState) (changed bool, err error) {
	a := l.Attrs()
	if _, ok := d.entries[a.Index]; ok || was.kind != kindNone {
		changed = true
		if err := removeFilters(l, d.hooks); err != nil && !isGone(a.Index) {
			return true, fmt.Errorf("detach from interface %s: %w", a.Name, err)
		}
		err = d.forget(a.Index)
	}
	if slices.Contains(unserved, l.Type()) {
		text := fmt.Sprintf("pods behind %s interface %s are not served", strings.ToUpper(l.Type()), a.Name)
		changed = changed || len(was.findings) == 0
		d.states[a.Index] = deviceState{name: a.Name, findings: []string{text}}
	}
	return changed, err
}

// forget removes what is kept of an interface. Its filters end with it.
func (d *devices) forget(index int) (err error) {
	for _, h := range d.hooks {
		if e := os.Remove(h.pin(index, d.o.pins)); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	if e := d.o.devices.Delete(uint32(index)); e != nil && !errors.Is(e, ebpf.ErrKeyNotExist) {
		err = errors.Join(err, e)
	}
	delete(d.entries, index)
	delete(d.states, index)
	return err
}

// isGone reports whether an interface has been deleted or has left the namespace, so that errors do not matter.
func isGone(index int) bool {
	_, err := netlink.LinkByIndex(index)
	return errors.As(err, &netlink.LinkNotFoundError{})
}

// stateful are the beginnings of the names of tc programs that keep connections of their own (Cilium, Calico, and the
// network policy agent of AWS). They see a Service in one direction and its endpoint in the other, so they may drop
// replies.
var stateful = []string{"cil_", "cali", "from_container", "to_container", "handle_ingress", "handle_egress", "tc_cls"}

func foreign(s deviceState, programs []string) []string {
	for _, name := range programs {
		begins := func(with string) bool { return strings.HasPrefix(name, with) }
		if s.kind == kindPod && slices.ContainsFunc(stateful, begins) {
			return []string{fmt.Sprintf("interface %s has the program %s of another service proxy or network policy "+
				"agent; Services may fail there", s.name, name)}
		}
	}
	return nil
}

// detach removes the programs of an earlier agent from all devices.
func (d *devices) detach() error {
	links, err := whole(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	errs := []error{os.RemoveAll(d.o.pins)} // with the links at tcx
	for _, l := range links {
		if err := removeFilters(l, d.hooks); err != nil && !isGone(l.Attrs().Index) {
			errs = append(errs, fmt.Errorf("detach from interface %s: %w", l.Attrs().Name, err))
		}
	}
	return errors.Join(errs...)
}

// Findings returns why some pods may not reach Services.
func (d *devices) Findings() (all []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.states {
		all = append(all, s.findings...)
	}
	slices.Sort(all)
	return all
}

// Attached returns the kinds of the devices that have the programs, by name.
func (d *devices) Attached() map[string]kind {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := map[string]kind{}
	for _, s := range d.states {
		if s.attached {
			all[s.name] = s.kind
		}
	}
	return all
}

// MTU returns the smallest MTU of the devices that are up, or 0 without any.
func (d *devices) MTU() (smallest int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.states {
		if s.mtu != 0 && (smallest == 0 || s.mtu < smallest) {
			smallest = s.mtu
		}
	}
	return smallest
}

// whole repeats a dump that changed while it was read.
func whole[T any](dump func() ([]T, error)) (list []T, err error) {
	for range 5 {
		if list, err = dump(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}
