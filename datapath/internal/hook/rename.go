package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
)

// existing returns an interface that should have the programs. It finds a renamed one by its index: the programs stay
// attached, so no packet is lost, and their pins, the state and the options get the new name.
func (a *Hooks) existing(name string) (netlink.Link, error) {
	nic, err := netlink.LinkByName(name)
	if !errors.As(err, new(netlink.LinkNotFoundError)) || a.index[name] == 0 {
		return nic, err
	}
	renamed, byIndex := netlink.LinkByIndex(a.index[name])
	if byIndex != nil || slices.Contains(a.names, renamed.Attrs().Name) {
		return nil, err
	}
	now := renamed.Attrs().Name
	for _, kind := range pinKinds {
		if err := a.renamePin(PinName(name, kind), PinName(now, kind)); err != nil {
			return nil, fmt.Errorf("renamed to %s: %w", now, err)
		}
	}
	a.names[slices.Index(a.names, name)] = now
	a.o.Interfaces, a.o.Keep = replaced(a.o.Interfaces, name, now), replaced(a.o.Keep, name, now)
	s := a.status[name]
	s.Name = now
	a.status[now], a.index[now], a.Needed[now] = s, a.index[name], a.Needed[name]
	delete(a.status, name)
	delete(a.index, name)
	delete(a.Needed, name)
	delete(a.Foreign, name)
	a.Log.Warn("interface renamed; it forwards by its new name", "interface", name, "name", now,
		"fix", "write the new name where the configuration has the old one")
	return renamed, nil
}

func replaced(names []string, old, now string) []string {
	names = slices.Clone(names)
	if i := slices.Index(names, old); i >= 0 {
		names[i] = now
	}
	return names
}

// renamePin renames the pin of a link, if there is one.
func (a *Hooks) renamePin(old, now string) error {
	if err := os.Rename(a.Pins.Link(old), a.Pins.Link(now)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if l := a.Held[old]; l != nil {
		delete(a.Held, old)
		a.Held[now] = l
	}
	return nil
}
