package dptest

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
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

// DetachXDP removes the XDP program from an interface.
func DetachXDP(name string) error { return setXDP(name, -1) }

func setXDP(name string, fd int) error {
	nic, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return netlink.LinkSetXdpFd(nic, fd)
}
