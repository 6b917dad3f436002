package datapath

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// pinForeignXDP replaces the pinned XDP link of eth0 by one whose program the kernel does not exchange for sy_xdp: the
// expected attach types differ (bpf_xdp_link_update in net/core/dev.c returns EINVAL). It returns the id of the link.
func (fx *fixture) pinForeignXDP() (id link.ID) {
	fx.t.Helper()
	fx.do(func() error {
		path := fx.o.PinPath + "/" + pin.Schema + "/links/" + hook.PinName("eth0", string(ModeXDP))
		if err := pin.Unpin(path); err != nil {
			return err
		}
		prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "foreign", Type: ebpf.XDP, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}, // XDP_PASS
		})
		if err != nil {
			return err
		}
		defer prog.Close()
		l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: int(fx.nic), Flags: link.XDPDriverMode})
		if err != nil {
			return err
		}
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return err
		}
		id = info.ID
		return l.Pin(path)
	})
	return id
}

// When the kernel does not update a pinned link, Open returns the kernel's error and keeps the link in force.
func TestUpdateErrorOfALinkIsReturned(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	fx.service(lb.TCP, "b1")
	fx.close()
	id := fx.pinForeignXDP()
	fx.do(func() error {
		d, err := Open(fx.o)
		if err == nil {
			d.Close()
		}
		if !errors.Is(err, unix.EINVAL) {
			t.Errorf("Open: %v; want the error of the update", err)
		}
		l, err := link.NewFromID(id)
		if err != nil {
			return fmt.Errorf("the link in force was removed: %w", err)
		}
		return l.Close()
	})
}

// A pinned link whose interface was deleted is replaced by a new one on the interface that has its name now.
func TestLinkOfADeletedInterfaceIsReplaced(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{ModeXDP, ModeTC} {
		fx := newFixture(t, hookTC, false, func(o *Options) { o.Mode = mode })
		fx.close()
		fx.recreateUplink()
		fx.do(func() (err error) {
			fx.d, err = Open(fx.o)
			return err
		})
		if s := fx.d.Interfaces()[0]; s.Mode != mode || s.Hook != labtest.TCHook(t) {
			t.Errorf("attached as %+v", s)
		}
	}
}

// recreateUplink deletes eth0 and adds another interface of that name.
func (fx *fixture) recreateUplink() {
	fx.t.Helper()
	fx.do(func() error {
		nic, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := netlink.LinkDel(nic); err != nil {
			return err
		}
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer0"}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		return netlink.LinkSetUp(veth)
	})
}
