package hook

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// Programs of other software on the same interface may run before ours. Most pass on packets that they do not know. To
// detect one that does not, the agent runs it on a synthetic packet.

// Foreign describes the programs of other software, except our service proxy, that run before ours on an interface.
type Foreign struct {
	ids   []ebpf.ProgramID
	at    time.Time
	fault error
	// hidden lists the programs that this process may not run, because opening a program by its id needs CAP_SYS_ADMIN.
	hidden []ebpf.ProgramID
}

// foreignEvery is how often unchanged programs of other software are run on a synthetic packet.
const foreignEvery = 5 * time.Second

// blocked returns why a packet that arrives on an interface does not reach our programs, or nil if it does.
func (a *Hooks) blocked(nic netlink.Link, hook string, frame []byte) error {
	xdp, tc, err := a.ahead(nic, hook)
	if err != nil {
		return err
	}
	was, ids := a.Foreign[nic.Attrs().Name], append(slices.Clone(xdp), tc...)
	if slices.Equal(was.ids, ids) && (len(ids) == 0 || time.Since(was.at) < foreignEvery) {
		return was.fault
	}
	now := Foreign{ids: ids, at: time.Now()}
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
		try(id, "XDP", context, bpf.XDPPass)
	}
	skb := make([]byte, skbSize)
	binary.NativeEndian.PutUint32(skb[skbIfindex:], index)
	for _, id := range tc {
		try(id, "tc", skb, tcxNext)
	}
	a.Foreign[nic.Attrs().Name] = now
	return now.fault
}

// ahead returns the programs of other software that run before ours.
func (a *Hooks) ahead(nic netlink.Link, hook string) (xdp, tc []ebpf.ProgramID, err error) {
	ours, err := a.ids.of(a.programs.XDP)
	if err != nil {
		return nil, nil, err
	}
	if x := nic.Attrs().Xdp; x != nil && x.ProgId != 0 && x.ProgId != uint32(ours) {
		xdp = append(xdp, ebpf.ProgramID(x.ProgId))
	}
	if hook != "tcx" {
		return xdp, nil, nil
	}
	if ours, err = a.ids.of(a.programs.In); err != nil {
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
		if id, ok := p.LinkID(); !ok || !a.isServiceProxy(nic, id) {
			tc = append(tc, p.ID)
		}
	}
	return xdp, tc, nil
}

// isServiceProxy reports whether a tcx link is one of this node's service proxy (package inside), which pins them.
func (a *Hooks) isServiceProxy(nic netlink.Link, id link.ID) bool {
	pins, err := filepath.Glob(filepath.Join(a.Pins.Dir, "inside", "tcx", fmt.Sprintf("%d-*", nic.Attrs().Index)))
	if err != nil {
		return false
	}
	return slices.ContainsFunc(pins, func(path string) bool {
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return false
		}
		defer l.Close()
		info, err := l.Info()
		return err == nil && info.ID == id
	})
}

type xdpContext struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }

// Size of struct __sk_buff, and offset of its ifindex.
const (
	skbSize    = 192
	skbIfindex = 40
)

// tcxNext is TCX_NEXT, which makes the next program run.
const tcxNext = ^uint32(0)

// Findings returns the changes that Cleanup cannot undo, the programs of other software that run before ours and that
// this process may not examine, and why this machine's own connections are not balanced.
func (a *Hooks) Findings() (list []lb.Finding) {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	if err := a.Sysctls.Unsaved(); err != nil {
		list = append(list, lb.FoundSysctlsNotStored.About("",
			"values of sysctls for \"steelyard cleanup\" not stored: %v", err))
	}
	for _, name := range slices.Sorted(maps.Keys(a.Foreign)) {
		if ids := a.Foreign[name].hidden; len(ids) > 0 {
			list = append(list, lb.FoundHiddenPrograms.About(name,
				"%s: cannot verify without CAP_SYS_ADMIN whether other programs that run before ours (id %s) pass "+
					"packets on", name, strings.Trim(fmt.Sprint(ids), "[]")))
		}
	}
	if a.socketsFault != nil {
		list = append(list, lb.FoundLocalClients.About("",
			"connections of this machine to its VIPs are not balanced: %v", a.socketsFault))
	}
	return list
}

// passes returns an error if a program does not pass a packet on to the next one, or if this process may not run the
// program. It ignores other failures to run it.
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
