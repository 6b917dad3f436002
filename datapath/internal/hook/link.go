package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
)

// place is an interface's hook at which a link runs one of our programs.
type place struct {
	pin    string // name of the link's pin
	index  int    // of the interface, or id of the cgroup
	prog   *ebpf.Program
	attach func() (link.Link, error)
	links  func() ([]link.ID, error) // returns the links currently attached there
}

// pinned makes a link at this place run its program. It updates the existing link atomically. If there is none, or its
// interface was deleted, it creates a new link. If the kernel refuses an update for another reason, pinned returns the
// error and leaves the link attached, because the kernel would refuse a new link as well.
func (a *Hooks) pinned(h place) error {
	path := a.Pins.Link(h.pin)
	switch done, err := a.updateLink(h); {
	case err != nil:
		return fmt.Errorf("update the link %s: %w", h.pin, err)
	case done:
		return nil
	}
	if err := errors.Join(pin.Unpin(path), a.drop(h.pin)); err != nil {
		return err
	}
	l, err := a.orphan(h)
	if l == nil && err == nil {
		l, err = h.attach()
	}
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin the link %s: %w", h.pin, err)
	}
	a.open.OnFailure(func() error { return pin.Unpin(path) })
	return a.hold(h.pin, l)
}

// hold keeps a descriptor of the link pinned under this name. So removing the pin does not detach the link, and it can
// be pinned again. Opening a link by its id would need CAP_SYS_ADMIN.
func (a *Hooks) hold(name string, l link.Link) error {
	err := a.drop(name)
	if err != nil {
		return err
	}
	a.Held[name], err = duplicate(l)
	return err
}

// drop closes the held descriptor of a link.
func (a *Hooks) drop(name string) error {
	l := a.Held[name]
	if l == nil {
		return nil
	}
	delete(a.Held, name)
	return l.Close()
}

// duplicate returns another descriptor of a link, which does not know the link's pin.
func duplicate(l link.Link) (link.Link, error) {
	d, ok := l.(interface{ FD() int })
	if !ok {
		return nil, fmt.Errorf("%T has no descriptor", l)
	}
	fd, err := unix.FcntlInt(uintptr(d.FD()), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("duplicate the descriptor of a link: %w", err)
	}
	return link.NewFromFD(fd)
}

// orphan finds a link at this place that has no pin of this name, makes it run our program and returns it. Such a link
// is from a previous agent, or from this one before the interface was renamed. orphan returns nil if there is none, or
// if this process may not open links by their ids.
func (a *Hooks) orphan(h place) (link.Link, error) {
	ids, err := h.links()
	if err != nil {
		return nil, nil // attach will report what is wrong
	}
	for _, id := range ids {
		l, err := link.NewFromID(id)
		if err != nil {
			continue
		}
		earlier, name := programOf(l)
		if name == "" || name != nameOf(h.prog) {
			l.Close()
			continue
		}
		a.open.KeepProgram(earlier, func(earlier *ebpf.Program) error {
			l, err := link.NewFromID(id)
			return restore(l, err, id, earlier)
		})
		if err := l.Update(h.prog); err != nil {
			return nil, errors.Join(fmt.Errorf("update the link %d: %w", id, err), l.Close())
		}
		if was, ours := a.holds(id); ours { // same link and same program: flows continue
			a.Log.Info("link of a renamed interface taken over", "pin", h.pin, "was", was)
			return l, nil
		}
		a.Log.Warn("unpinned link of an earlier agent taken over; flows of that agent end",
			"pin", h.pin, "program", name)
		return l, nil
	}
	return nil, nil
}

// holds returns the pin name of a link that this agent holds, and whether it does.
func (a *Hooks) holds(id link.ID) (pin string, ok bool) {
	for name, l := range a.Held {
		if info, err := l.Info(); err == nil && info.ID == id {
			return name, true
		}
	}
	return "", false
}

// programOf returns the id and name of the program that a link runs, or 0 and "" if they cannot be read.
func programOf(l link.Link) (id ebpf.ProgramID, name string) {
	info, err := l.Info()
	if err != nil {
		return 0, ""
	}
	prog, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return 0, ""
	}
	defer prog.Close()
	return info.Program, nameOf(prog)
}

// restore makes the link run its previous program again.
func restore(l link.Link, err error, name any, earlier *ebpf.Program) error {
	if err == nil {
		err = errors.Join(l.Update(earlier), l.Close())
	}
	if err != nil {
		return fmt.Errorf("restore the link %v: %w", name, err)
	}
	return nil
}

func nameOf(prog *ebpf.Program) string {
	info, err := prog.Info()
	if err != nil {
		return ""
	}
	return info.Name
}

// updateLink makes the link at a place run its program. It returns false if there is no link to update.
func (a *Hooks) updateLink(h place) (done bool, err error) {
	l, err := a.current(h.pin)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil || linkIndex(info) != h.index {
		return false, err
	}
	a.open.KeepProgram(info.Program, func(earlier *ebpf.Program) error {
		l, err := link.LoadPinnedLink(a.Pins.Link(h.pin), nil)
		return restore(l, err, h.pin, earlier)
	})
	err = l.Update(h.prog)
	if errors.Is(err, unix.ENOLINK) { // the interface was deleted after Info
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, a.hold(h.pin, l)
}

// current returns the link that is held or pinned under this name.
func (a *Hooks) current(name string) (link.Link, error) {
	if held := a.Held[name]; held != nil {
		return duplicate(held)
	}
	return link.LoadPinnedLink(a.Pins.Link(name), nil)
}

// repin restores links' pins that were removed.
func (a *Hooks) repin() (n int, err error) {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	for name, held := range a.Held {
		path := a.Pins.Link(name)
		if !errors.Is(unix.Access(path, unix.F_OK), unix.ENOENT) {
			continue
		}
		l, err := duplicate(held)
		if err != nil {
			return n, err
		}
		err = errors.Join(l.Pin(path), l.Close())
		if err != nil {
			return n, fmt.Errorf("pin the link %s: %w", name, err)
		}
		n++
	}
	return n, nil
}

// Close closes the descriptors of all links, which the pins keep attached.
func (a *Hooks) Close() (err error) {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	for name := range a.Held {
		err = errors.Join(err, a.drop(name))
	}
	a.kernel.Close()
	return err
}

// PinName returns the name of a link's pin. It escapes dots, which occur in names of VLAN interfaces, because bpffs
// refuses them.
func PinName(iface, kind string) string { return pinEscape.Replace(iface) + ":" + kind }

// pinKinds lists the kinds of links that an interface may have.
var pinKinds = []string{string(ModeXDP), string(ModeXDPGeneric), Inward.Pin, Outward.Pin}

var pinEscape = strings.NewReplacer("%", "%25", ".", "%2e")

// linkIndex returns the index of the interface or the id of the cgroup that a link is attached to, or 0 if it was
// deleted or the link has another type.
func linkIndex(info *link.Info) int {
	if x := info.XDP(); x != nil {
		return int(x.Ifindex)
	}
	if x := info.TCX(); x != nil {
		return int(x.Ifindex)
	}
	if x := info.Cgroup(); x != nil {
		return int(x.CgroupId)
	}
	return 0
}

// unpin removes the link pinned under this name, if there is one.
func (a *Hooks) unpin(name string) error {
	return errors.Join(pin.Unpin(a.Pins.Link(name)), a.drop(name))
}
