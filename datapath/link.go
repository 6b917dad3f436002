package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// pinned makes the link pinned under name run prog on interface index: by an atomic update of the pinned link or, when
// there is none or its interface was deleted, by a new link from attach. When the kernel refuses an update for another
// reason, the pinned link stays in force and the error is returned: a new link would meet the same refusal, after the
// old one was removed.
func (a *attachments) pinned(name string, index int, prog *ebpf.Program, attach func() (link.Link, error)) error {
	path := a.pins.link(name)
	switch done, err := a.updateLink(path, index, prog); {
	case err != nil:
		return fmt.Errorf("update the link %s: %w", name, err)
	case done:
		return nil
	}
	if err := unpin(path); err != nil {
		return err
	}
	l, err := attach()
	if err != nil {
		return err
	}
	defer l.Close() // the pin keeps it
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin the link %s: %w", name, err)
	}
	a.open.onFailure(func() error { return unpin(path) })
	return nil
}

// updateLink makes the pinned link run prog. It reports false when there is no link on interface index to update.
func (a *attachments) updateLink(path string, index int, prog *ebpf.Program) (done bool, err error) {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil || linkIndex(info) != index {
		return false, err
	}
	a.open.keepProgram(info.Program, func(earlier *ebpf.Program) error { return restoreLink(path, earlier) })
	err = l.Update(prog)
	if errors.Is(err, unix.ENOLINK) { // the interface was deleted after Info
		return false, nil
	}
	return err == nil, err
}

// restoreLink makes a pinned link run an earlier program again.
func restoreLink(path string, earlier *ebpf.Program) error {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return fmt.Errorf("open the link %s: %w", filepath.Base(path), err)
	}
	defer l.Close()
	if err := l.Update(earlier); err != nil {
		return fmt.Errorf("restore the link %s: %w", filepath.Base(path), err)
	}
	return nil
}

// pinName is the name of a link's pin: bpffs refuses dots, which names of VLAN interfaces have.
func pinName(iface, kind string) string {
	return strings.NewReplacer("%", "%25", ".", "%2e").Replace(iface) + ":" + kind
}

// linkIndex returns the interface that a link is attached to; 0 after that was deleted, and for links of other types.
func linkIndex(info *link.Info) int {
	if x := info.XDP(); x != nil {
		return int(x.Ifindex)
	}
	if x := info.TCX(); x != nil {
		return int(x.Ifindex)
	}
	return 0
}

// unpin removes a link, if there is one, also where an agent of another schema pinned it.
func (a *attachments) unpin(name string) error {
	err := unpin(a.pins.link(name))
	if a.pins.older == "" {
		return err
	}
	return errors.Join(err, unpin(filepath.Join(a.pins.older, "links", name)))
}

// unpin removes a link, if there is one.
func unpin(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the link %s: %w", filepath.Base(path), err)
	}
	defer l.Close()
	if err := l.Unpin(); err != nil {
		return fmt.Errorf("remove the link %s: %w", filepath.Base(path), err)
	}
	return nil
}
