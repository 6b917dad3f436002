package hook

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
)

// Options says where and how to attach programs (datapath.Options).
type Options struct {
	Interfaces, Keep                    []string
	FollowRoutes, Delivers, ForceClsact bool
	LocalClients                        bool
	Mode                                Mode
	// Attached is called after programs were attached to an interface. An error makes Attach fail.
	Attached func(name string) error
}

// Deps holds what the hooks work with.
type Deps struct {
	Objects *bpf.Objects
	Chunks  *table.Chunks
	Pins    *pin.Pins
	Sysctls *sysctl.Settings
	Flows   *flow.Collector
	Log     *slog.Logger
}

// InterfaceStatus describes how programs are attached to an interface.
type InterfaceStatus struct {
	Name  string `json:"interface"`
	Mode  Mode   `json:"mode"` // xdp, xdp-generic or tc, or "" while the interface does not exist
	Hook  string `json:"hook"` // tcx or clsact
	Fault string `json:"reason,omitempty"`
	Down  bool   `json:"down,omitempty"` // set down, or without a carrier
}

// Hooks maintains the programs on the interfaces: on the uplinks in Options, and on the interfaces towards backends,
// where replies arrive.
type Hooks struct {
	Deps
	o       Options
	repairs repairs
	probes  probes
	open    *pin.Transaction // nil after Commit
	// complete is the state of the pins when RepairPins last found none missing. Only RepairPins uses it.
	complete pin.Stamp
	kernel   route.Kernel // for the requests of each round

	Mu       sync.Mutex // guards all below
	programs Programs   // that should be on the interfaces
	names    []string   // interfaces that should have the programs
	status   map[string]InterfaceStatus
	index    map[string]int    // current index by name, or 0 if the interface does not exist
	links    map[int]LinkState // all interfaces by index, as of the last change
	onLo     bool              // lo has the program for health checks
	// sockets says that this machine's own connections should be balanced, and socketsFault why they are not.
	sockets      bool
	socketsFault error
	ids          programIDs
	Held         map[string]link.Link // by pin name
	// Needed holds the time when a route last used an interface, by name.
	Needed map[string]time.Time
	// Foreign describes the programs of other software, by interface name.
	Foreign map[string]Foreign
	// notFollowed holds the last error of attaching to an interface that routes use, by name.
	notFollowed map[string]string
}

// New returns the hooks of an agent that is starting. t undoes what Attach does.
func New(d Deps, o Options, t *pin.Transaction) *Hooks {
	return &Hooks{
		Deps: d, o: o, open: t, programs: Plain(d.Objects), probes: probes{marks: map[probeKey]uint32{}},
		repairs: repairs{n: map[string]uint64{"programs": 0, "pins": 0, "forwarding": 0}},
		status:  map[string]InterfaceStatus{}, index: map[string]int{}, ids: programIDs{},
		Foreign: map[string]Foreign{}, notFollowed: map[string]string{},
		Needed: map[string]time.Time{}, Held: map[string]link.Link{},
	}
}

// Attach attaches the programs to all uplinks and to the needed interfaces. Interfaces that do not exist are attached
// when they appear. The steps most likely to fail come first; until they succeed, all of a previous agent's programs
// stay active.
func (a *Hooks) Attach(needed []int) error {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	if err := a.chain(); err != nil {
		return err
	}
	if err := a.forward("lo"); err != nil {
		return err
	}
	a.names = slices.Clone(a.o.Interfaces)
	var nics []netlink.Link
	for _, name := range a.names {
		nic, err := a.prepare(name)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			a.Log.Warn("interface not found; programs will be attached when it appears", "interface", name)
			a.gone(name)
			continue
		}
		if err != nil {
			return err
		}
		nics = append(nics, nic)
	}
	if err := a.readLinks(); err != nil {
		return err
	}
	for _, name := range a.o.Keep {
		if slices.Contains(a.names, name) {
			continue
		}
		a.names = append(a.names, name)
		if nic, err := a.prepare(name); err == nil {
			nics = append(nics, nic)
		} else {
			a.gone(name)
		}
	}
	for _, name := range a.missing(needed) {
		nic, err := a.prepare(name)
		if err != nil {
			a.Log.Warn("programs not attached", "interface", name, "err", err)
			continue
		}
		a.names = append(a.names, name)
		nics = append(nics, nic)
	}
	for _, nic := range nics {
		if err := a.exchange(nic); err != nil {
			return err
		}
	}
	return nil
}

// prepare makes an interface ready to forward.
func (a *Hooks) prepare(name string) (netlink.Link, error) {
	nic, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	if is := nic.Attrs().EncapType; is != "ether" && is != "loopback" {
		return nil, fmt.Errorf("interface %s: its packets have no Ethernet header (%s)", name, is)
	}
	if a.o.Delivers { // the stack forwards to the pods
		err = a.forward(name)
	}
	return nic, err
}

// forward enables forwarding of packets that arrive on an interface.
func (a *Hooks) forward(name string) error {
	err := a.Sysctls.Forward(name)
	if errors.Is(err, unix.EROFS) { // in a container; the reason no_forwarding counts packets that this affects
		a.Log.Warn("forwarding not enabled", "interface", name, "err", err,
			"fix", ForwardFix(name))
		return nil
	}
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return nil
}

// ForwardFix returns the command that an operator can run instead. It does not enable forwarding on other interfaces,
// which would turn an appliance into a router. In setting names, sysctl writes dots in interface names as slashes.
func ForwardFix(name string) string {
	name = strings.ReplaceAll(name, ".", "/")
	fix := fmt.Sprintf("sysctl -w net.ipv4.conf.%[1]s.forwarding=1 net.ipv6.conf.%[1]s.forwarding=1", name)
	if name == "lo" {
		fix += " net.ipv4.conf.lo.accept_local=1"
	}
	return fix
}

// exchange attaches the programs to an interface, replacing those that a previous agent pinned. After Open, tc works
// alone where XDP cannot be attached, because tc does everything that XDP does.
func (a *Hooks) exchange(nic netlink.Link) error {
	name, fault := nic.Attrs().Name, ""
	hook, err := a.attachTC(nic, Inward, Outward)
	if err != nil {
		return fmt.Errorf("attach tc to %s: %w", name, err)
	}
	mode, err := a.attachXDP(nic)
	if err != nil {
		err = fmt.Errorf("attach XDP to %s: %w", name, err)
		if a.open != nil && slices.Contains(a.o.Interfaces, name) {
			return err
		}
		if err := a.removeUplink(nic.Attrs().Index); err != nil {
			return err
		}
		mode, fault = ModeTC, err.Error()+"; only tc forwards"
	}
	a.index[name] = nic.Attrs().Index
	now := InterfaceStatus{Name: name, Mode: mode, Hook: hook, Fault: fault}
	if a.status[name] != now {
		a.Log.Info("programs attached", "interface", name, "mode", mode, "hook", hook, "reason", fault)
	}
	a.status[name] = now
	return a.o.Attached(name)
}

// Commit ends the agent's start and keeps what Attach did. If this node has no local backends, it also disables the
// forwarding that a previous agent enabled on the uplinks.
func (a *Hooks) Commit() error {
	t := a.open
	a.open = nil
	err := errors.Join(t.Commit(), a.prune())
	if err == nil && !a.o.Delivers {
		err = a.Sysctls.StopForwarding()
	}
	return err
}

// prune removes the links of interfaces that should have none.
func (a *Hooks) prune() error {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	entries, err := os.ReadDir(filepath.Join(a.Pins.Dir, "links"))
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
	var errs []error
	for _, e := range entries {
		wanted := a.o.LocalClients && isSocketPin(e.Name()) || slices.ContainsFunc(a.names, func(name string) bool {
			return strings.HasPrefix(e.Name(), PinName(name, ""))
		})
		if !wanted {
			errs = append(errs, a.unpin(e.Name()))
		}
	}
	return errors.Join(errs...)
}

// missing returns the names of the interfaces with these indexes that do not have the programs under any name. It omits
// non-Ethernet interfaces, because the programs expect an Ethernet header.
func (a *Hooks) missing(indexes []int) (names []string) {
	attached := slices.Collect(maps.Values(a.index))
	for _, i := range indexes {
		l, ok := a.links[i]
		if ok && l.ethernet && !slices.Contains(attached, i) && !slices.Contains(a.names, l.Name) &&
			!slices.Contains(names, l.Name) {
			names = append(names, l.Name)
		}
	}
	slices.Sort(names)
	return names
}

// Follow also attaches the programs to these interfaces, because routes use them.
func (a *Hooks) Follow(indexes []int) {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	for _, name := range a.missing(indexes) {
		nic, err := a.prepare(name)
		if err == nil {
			err = a.exchange(nic)
		}
		if err != nil {
			if a.notFollowed[name] != err.Error() { // log a repeated error only once
				a.Log.Error("programs not attached to an interface that routes use", "interface", name, "err", err)
			}
			a.notFollowed[name] = err.Error()
			continue
		}
		delete(a.notFollowed, name)
		a.names = append(a.names, name)
		a.Log.Info("programs attached because routes use the interface", "interface", name)
	}
	a.need(indexes, time.Now())
}

// attachLo attaches the program that sends health checks to the servers of services with direct return.
func (a *Hooks) attachLo() error {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	if a.onLo {
		return nil
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("interface lo: %w", err)
	}
	if _, err := a.attachTC(lo, Outward); err != nil {
		return fmt.Errorf("attach tc to lo: %w", err)
	}
	a.onLo = true
	return nil
}

// LinkState is the part of an interface's state that the verification uses.
type LinkState struct {
	Name     string
	Running  bool // up, with a carrier
	ethernet bool
	// NoARP says that the kernel sends to the Ethernet interface's own MAC address instead of resolving the receiver's.
	NoARP bool
}

func stateOf(nic netlink.Link) LinkState {
	a := nic.Attrs()
	return LinkState{
		Name:     a.Name,
		Running:  a.RawFlags&unix.IFF_UP != 0 && a.RawFlags&unix.IFF_RUNNING != 0,
		ethernet: a.EncapType == "ether",
		NoARP: a.EncapType == "ether" && a.RawFlags&unix.IFF_NOARP != 0 &&
			!slices.Contains([]string{"dummy", "ipvlan", "vrf"}, nic.Type()), // these need no MAC address
	}
}

// readLinks rereads the interfaces from the kernel.
func (a *Hooks) readLinks() error {
	nics, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list the interfaces: %w", err)
	}
	a.links = make(map[int]LinkState, len(nics))
	for _, nic := range nics {
		a.links[nic.Attrs().Index] = stateOf(nic)
	}
	return nil
}
