package hook

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Programs are the programs on the interfaces, and Decap, with which In continues.
type Programs struct{ XDP, In, Decap, Out *ebpf.Program }

// Plain returns the programs that do not trace.
func Plain(o *bpf.Objects) Programs { return Programs{o.SyXdp, o.SyTcIn, o.SyTcDecap, o.SyTcOut} }

// ofPin returns the program of a link with this pin name, or nil if it is none of these programs.
func (p Programs) ofPin(name string) *ebpf.Program {
	switch kind := name[strings.LastIndexByte(name, ':')+1:]; kind {
	case string(ModeXDP), string(ModeXDPGeneric):
		return p.XDP
	case Inward.Pin:
		return p.In
	case Outward.Pin:
		return p.Out
	}
	return nil
}

// Use replaces the programs on all interfaces by p, each in one step, so that every packet is processed by one or the
// other. Interfaces that are attached later run p as well. If a replacement fails, Repair tries again. p must use the
// maps of the previous programs, and stay open until the next call of Use.
func (a *Hooks) Use(p Programs) error {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	a.programs, a.ids = p, programIDs{}
	errs := []error{a.putChain()}
	for name, l := range a.Held {
		prog := p.ofPin(name)
		if prog == nil || isSocketPin(name) {
			continue
		}
		if err := l.Update(prog); err != nil {
			errs = append(errs, fmt.Errorf("update the link %s: %w", name, err))
		}
	}
	for name, s := range a.status {
		if s.Hook == "clsact" {
			errs = append(errs, replaceFilters(name, p, Inward, Outward))
		}
	}
	if a.onLo {
		errs = append(errs, replaceFilters("lo", p, Outward))
	}
	return errors.Join(errs...)
}

// replaceFilters replaces the programs of our clsact filters on an interface, if there are any.
func replaceFilters(name string, p Programs, directions ...Direction) error {
	nic, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	for _, d := range directions {
		filter, err := ClsactFilter(nic, d)
		if err == nil && filter != nil {
			err = setFilter(nic, d, d.prog(p))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
