package hook

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
)

// This file compares the programs on the interfaces with the expected ones, and attaches ours where they are
// missing.

// programIDs caches the kernel's ids of our programs.
type programIDs map[*ebpf.Program]ebpf.ProgramID

func (ids programIDs) of(prog *ebpf.Program) (ebpf.ProgramID, error) {
	if id, ok := ids[prog]; ok {
		return id, nil
	}
	info, err := prog.Info()
	if err != nil {
		return 0, err
	}
	id, ok := info.ID()
	if !ok {
		return 0, errors.New("the kernel returned no program id")
	}
	ids[prog] = id
	return id, nil
}

// Repair attaches missing programs to the interfaces, and returns faults that it cannot repair. changed says that
// interfaces have changed since the last call. made is a synthetic client packet, or nil if there is no service.
func (a *Hooks) Repair(changed bool, made []byte) (faults []string) {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	if changed {
		if err := a.readLinks(); err != nil {
			faults = append(faults, err.Error())
		}
	}
	running, last := false, ""
	for _, name := range slices.Clone(a.names) {
		nic, err := a.existing(name)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			a.gone(name)
			last = name + " does not exist"
			continue
		}
		if err != nil {
			return []string{fmt.Sprintf("%s: %v", name, err)}
		}
		name = nic.Attrs().Name
		err = a.repairOne(nic, changed)
		if err == nil && made != nil {
			err = a.blocked(nic, a.status[name].Hook, made)
		}
		if err != nil {
			faults = append(faults, fmt.Sprintf("%s: %v", name, err))
		}
		if stateOf(nic).Running {
			running = true
		} else {
			last = name + " is down"
		}
	}
	if !running {
		faults = append(faults, "no interface forwards: "+last)
	}
	if a.onLo {
		if err := a.repairLo(); err != nil {
			faults = append(faults, fmt.Sprintf("lo: %v", err))
		}
	}
	return faults
}

// gone records that an interface does not exist.
func (a *Hooks) gone(name string) {
	if a.index[name] != 0 || a.status[name].Name == "" {
		a.Log.Warn("interface does not exist", "interface", name)
		if err := a.detach(name); err != nil {
			a.Log.Error("programs not detached", "interface", name, "err", err)
		}
	}
	a.index[name], a.status[name] = 0, InterfaceStatus{Name: name}
	delete(a.Foreign, name)
	if !a.permanent(name) && !slices.Contains(a.o.Interfaces, name) { // the routes that required it are gone as well
		a.forget(name)
	}
}

// repairOne attaches the programs to an interface if they are not active there. With changed it also retries what
// failed before.
func (a *Hooks) repairOne(nic netlink.Link, changed bool) error {
	name, s := nic.Attrs().Name, a.status[nic.Attrs().Name]
	var err error
	if a.index[name] == nic.Attrs().Index && s.Mode != "" {
		if err = errors.Join(a.macChanged(nic), a.inspect(nic, s)); err == nil && (s.Fault == "" || !changed) {
			return nil
		}
	}
	again := a.index[name] == nic.Attrs().Index && err != nil
	if _, err := a.prepare(name); err != nil {
		return err
	}
	if err := a.exchange(nic); err != nil {
		a.status[name] = InterfaceStatus{Name: name, Fault: err.Error()}
		return err
	}
	if again {
		a.repaired("programs", "programs attached again", "interface", name, "reason", err)
	}
	return nil
}

func (a *Hooks) repairLo() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	hook := "tcx"
	if f, err := ClsactFilter(lo, Outward); err == nil && f != nil {
		hook = "clsact"
	}
	missing := a.inspectTC(lo, hook, Outward)
	if missing == nil {
		return nil
	}
	if _, err := a.attachTC(lo, Outward); err != nil {
		return err
	}
	a.repaired("programs", "programs attached again", "interface", "lo", "reason", missing)
	return nil
}

// inspect returns how the programs on an interface differ from the expected ones, or nil if they do not.
func (a *Hooks) inspect(nic netlink.Link, s InterfaceStatus) error {
	if err := a.inspectTC(nic, s.Hook, Inward, Outward); err != nil || s.Mode == ModeTC {
		return err
	}
	if err := a.runs(PinName(s.Name, string(s.Mode)), nic.Attrs().Index, a.programs.XDP); err != nil {
		return fmt.Errorf("XDP: %w", err)
	}
	up, err := a.uplink(nic.Attrs().Index)
	if err != nil {
		return err
	}
	if up.Ifindex == 0 {
		return errors.New("the entry in sy_uplinks was removed")
	}
	return nil
}

func (a *Hooks) inspectTC(nic netlink.Link, hook string, directions ...Direction) error {
	for _, d := range directions {
		prog := d.prog(a.programs)
		if hook == "tcx" {
			if err := a.runs(PinName(nic.Attrs().Name, d.Pin), nic.Attrs().Index, prog); err != nil {
				return fmt.Errorf("tc: %w", err)
			}
			continue
		}
		filter, err := ClsactFilter(nic, d)
		if err != nil {
			return err
		}
		id, err := a.ids.of(prog)
		if err != nil {
			return err
		}
		if filter == nil || filter.Id != int(id) {
			return errors.New("tc: the filter was removed or replaced")
		}
	}
	return nil
}

// runs returns nil if the link with this pin name runs prog on interface index, or else says what is wrong. It ignores
// whether the pin exists, which matters only to the next agent.
func (a *Hooks) runs(name string, index int, prog *ebpf.Program) error {
	l := a.Held[name]
	if l == nil {
		return errors.New("the link is missing")
	}
	info, err := l.Info()
	if err != nil {
		return err
	}
	id, err := a.ids.of(prog)
	switch {
	case err != nil:
		return err
	case linkIndex(info) != index:
		return errors.New("the link was detached")
	case info.Program != id:
		return fmt.Errorf("the link runs a different program (id %d)", info.Program)
	}
	return nil
}

// RepairForwarding enables forwarding where it was switched off. If that fails, synthetic packets show whether it
// matters.
func (a *Hooks) RepairForwarding() {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	names := []string{"lo"}
	if a.o.Delivers {
		names = append(names, a.names...)
	}
	for _, name := range names {
		missing := a.Sysctls.Forwards(name)
		if missing == "" {
			continue
		}
		if err := a.Sysctls.Forward(name); err != nil {
			a.Log.Debug("forwarding not enabled", "interface", name, "err", err)
			continue
		}
		a.repaired("forwarding", "forwarding enabled again", "interface", name, "setting", missing)
	}
	a.Sysctls.SaveAgain()
}

// Interfaces returns the attachment of each interface, sorted by name.
func (a *Hooks) Interfaces() (out []InterfaceStatus) {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(a.status)) {
		s := a.status[name]
		l, known := a.links[a.index[name]]
		s.Down = known && !l.Running
		out = append(out, s)
	}
	return out
}

// Absent is the fault of an interface that does not exist. No packet arrives there.
const Absent = "it does not exist"

// Inspect returns the current state of each interface. Fault says why a program is not active. Mode is "" if packets
// that arrive there are not forwarded.
func (a *Hooks) Inspect() (out []InterfaceStatus) {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	for _, name := range slices.Clone(a.names) {
		nic, err := a.existing(name)
		if err == nil {
			name = nic.Attrs().Name
		}
		s := a.status[name]
		switch {
		case err != nil:
			s = InterfaceStatus{Name: name, Fault: Absent}
		case a.index[name] != nic.Attrs().Index || s.Mode == "":
			s = InterfaceStatus{Name: name, Fault: "not attached"}
		default:
			s.Down = !stateOf(nic).Running
			if err := a.inspectTC(nic, s.Hook, Inward, Outward); err != nil {
				s = InterfaceStatus{Name: name, Fault: err.Error()}
			} else if err := a.Foreign[name].fault; err != nil {
				s = InterfaceStatus{Name: name, Fault: err.Error()}
			} else if err := a.inspect(nic, s); err != nil {
				s.Fault = err.Error()
			}
		}
		out = append(out, s)
	}
	return out
}
