package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Programs of others on the same interface run before ours. Most pass on what they do not know. One that does not is
// found by running it on a made packet.

// foreign are the programs of others on an interface that run before ours, and what is wrong with them.
type foreign struct {
	ids   []ebpf.ProgramID
	at    time.Time
	fault error
	// hidden are those that this process may not run: the kernel opens a program by its id only with CAP_SYS_ADMIN.
	hidden []ebpf.ProgramID
}

// foreignEvery is how often programs of others are run on a made packet while they are the same.
const foreignEvery = 5 * time.Second

// blocked returns why a packet that arrives on an interface does not get to our programs.
func (a *attachments) blocked(nic netlink.Link, hook string, frame []byte) error {
	xdp, tc, err := a.ahead(nic, hook)
	if err != nil {
		return err
	}
	was, ids := a.foreign[nic.Attrs().Name], append(slices.Clone(xdp), tc...)
	if slices.Equal(was.ids, ids) && (len(ids) == 0 || time.Since(was.at) < foreignEvery) {
		return was.fault
	}
	now := foreign{ids: ids, at: time.Now()}
	frame = slices.Clone(frame)
	copy(frame, nic.Attrs().HardwareAddr)
	index := uint32(nic.Attrs().Index)
	try := func(id ebpf.ProgramID, kind string, context any, pass uint32) {
		err := passes(id, kind, frame, context, pass)
		if errors.Is(err, unix.EPERM) {
			now.hidden = append(now.hidden, id)
			return
		}
		now.fault = errors.Join(now.fault, err)
	}
	for _, id := range xdp {
		context := xdpContext{DataEnd: uint32(len(frame)), Ingress: index}
		try(id, "XDP", context, xdpPass)
	}
	skb := make([]byte, skbSize)
	binary.NativeEndian.PutUint32(skb[skbIfindex:], index)
	for _, id := range tc {
		try(id, "tc", skb, tcxNext)
	}
	a.foreign[nic.Attrs().Name] = now
	return now.fault
}

// ahead returns the programs of others that run before ours.
func (a *attachments) ahead(nic netlink.Link, hook string) (xdp, tc []ebpf.ProgramID, err error) {
	ours, err := a.ids.of(a.objects.SyXdp)
	if err != nil {
		return nil, nil, err
	}
	if x := nic.Attrs().Xdp; x != nil && x.ProgId != 0 && x.ProgId != uint32(ours) {
		xdp = append(xdp, ebpf.ProgramID(x.ProgId))
	}
	if hook != "tcx" {
		return xdp, nil, nil
	}
	if ours, err = a.ids.of(a.objects.SyTcIn); err != nil {
		return nil, nil, err
	}
	list, err := link.QueryPrograms(link.QueryOptions{Target: nic.Attrs().Index, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		return nil, nil, err
	}
	for _, p := range list.Programs {
		if p.ID == ours {
			break
		}
		tc = append(tc, p.ID)
	}
	return xdp, tc, nil
}

// xdpContext is struct xdp_md.
type xdpContext struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }

// struct __sk_buff: its size, and the offset of ifindex.
const (
	skbSize    = 192
	skbIfindex = 40
)

// tcxNext is TCX_NEXT: the next program runs.
const tcxNext = ^uint32(0)

// hidden returns which programs of others run before ours and may not be examined.
func (a *attachments) hidden() (list []lb.Finding) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(a.foreign)) {
		if ids := a.foreign[name].hidden; len(ids) > 0 {
			list = append(list, lb.FoundHiddenPrograms.About(name,
				"%s: whether programs of others that run before ours (id %s) pass packets on is "+
					"not verified: this needs CAP_SYS_ADMIN", name, strings.Trim(fmt.Sprint(ids), "[]")))
		}
	}
	return list
}

// passes returns an error when a program does not let a packet pass to the next one, or when this process may not run
// it. What cannot be found out otherwise is no error.
func passes(id ebpf.ProgramID, kind string, frame []byte, context any, pass uint32) error {
	prog, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, unix.EPERM) {
		return err
	}
	if err != nil {
		return nil
	}
	defer prog.Close()
	result, err := prog.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: context})
	if err != nil || result == pass {
		return nil
	}
	name := ""
	if info, err := prog.Info(); err == nil {
		name = info.Name
	}
	return fmt.Errorf("the %s program %q (id %d), which runs before ours, does not pass packets on: result %d",
		kind, name, id, int32(result))
}
