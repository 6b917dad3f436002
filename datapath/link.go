package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// pinned makes the link pinned under name run prog on interface index: the one that is there by an atomic update, or a
// new one.
func (a *attachments) pinned(name string, index int, prog *ebpf.Program, attach func() (link.Link, error)) error {
	path := a.pins.link(name)
	if old, err := link.LoadPinnedLink(path, nil); err == nil {
		defer old.Close()
		if linkIndex(old) == index && old.Update(prog) == nil {
			return nil
		}
		if err := old.Unpin(); err != nil {
			return fmt.Errorf("remove the link %s of a gone interface: %w", name, err)
		}
		old.Close()
	}
	l, err := attach()
	if err != nil {
		return err
	}
	defer l.Close() // the pin keeps it
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin the link %s: %w", name, err)
	}
	return nil
}

// pinName is the name of a link's pin: bpffs refuses dots, which names of VLAN interfaces have.
func pinName(iface, kind string) string {
	return strings.NewReplacer("%", "%25", ".", "%2e").Replace(iface) + ":" + kind
}

// linkIndex returns the interface a link is attached to; 0 when that is gone.
func linkIndex(l link.Link) int {
	info, err := l.Info()
	if err != nil {
		return 0
	}
	if x := info.XDP(); x != nil {
		return int(x.Ifindex)
	}
	if x := info.TCX(); x != nil {
		return int(x.Ifindex)
	}
	return 0
}

func (a *attachments) unpin(name string) error { return unpin(a.pins.link(name)) }

// unpin ends a link; there may be none.
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
