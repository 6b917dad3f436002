package dptest

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// XDPDrop and XDPPass are results of an XDP program (enum xdp_action).
const XDPDrop, XDPPass = 1, 2

// AttachXDP attaches an XDP program of other software, which always returns result, to an interface in this thread's
// network namespace.
func AttachXDP(name string, result int32) error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, result), asm.Return()},
	})
	if err != nil {
		return fmt.Errorf("load an XDP program: %w", err)
	}
	defer prog.Close()
	return setXDP(name, prog.FD())
}

// AttachTCX attaches a program that passes all packets on, before all others at tcx ingress of an interface, and pins
// its link in a directory as our service proxy does.
func AttachTCX(name, dir string) error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "first", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		return fmt.Errorf("load a tc program: %w", err)
	}
	defer prog.Close()
	nic, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	l, err := link.AttachTCX(link.TCXOptions{
		Interface: nic.Attrs().Index, Program: prog, Attach: ebpf.AttachTCXIngress, Anchor: link.Head(),
	})
	if err != nil {
		return err
	}
	defer l.Close() // ends the link unless it is pinned
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return l.Pin(filepath.Join(dir, fmt.Sprintf("%d-sy_in", nic.Attrs().Index)))
}

// DetachXDP removes the XDP program from an interface.
func DetachXDP(name string) error { return setXDP(name, -1) }

func setXDP(name string, fd int) error {
	nic, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return netlink.LinkSetXdpFd(nic, fd)
}
