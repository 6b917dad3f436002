package datapath

import (
	"errors"
	"fmt"
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
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
)

// InterfaceStatus describes how programs are attached to an interface.
type InterfaceStatus struct {
	Name  string `json:"interface"`
	Mode  Mode   `json:"mode"` // xdp, xdp-generic or tc, or "" while the interface does not exist
	Hook  string `json:"hook"` // tcx or clsact
	Fault string `json:"reason,omitempty"`
	Down  bool   `json:"down,omitempty"` // set down, or without a carrier
}

// attachments maintains the programs on the interfaces: the uplinks of Options, and the interfaces towards backends,
// where replies arrive.
type attachments struct {
	o       Options
	objects *bpf.Objects
	pins    *pin.Pins
	sysctls *sysctl.Settings
	repairs *repairs
	open    *pin.Transaction // nil after Open

	mu     sync.Mutex // guards all below
	names  []string   // interfaces that should have the programs
	status map[string]InterfaceStatus
	index  map[string]int    // of the interface that has the programs, or 0 if there is none
	links  map[int]linkState // all interfaces, as of the last change
	onLo   bool              // health checks need the program on lo
	ids    programIDs
	held   map[string]link.Link // by pin name
	// needed is the time when a route last led to an interface, by name.
	needed map[string]time.Time
	// foreign lists the programs of other software, by interface.
	foreign map[string]foreign
	// notFollowed holds the last error of attaching to an interface that routes lead to, by name.
	notFollowed map[string]string
}

// attachAll attaches the programs to all uplinks and to the needed interfaces, in Open. Interfaces that do not exist
// yet are attached later. The steps most likely to fail come first: until they succeed, all programs of an earlier
// agent remain in force.
func (a *attachments) attachAll(needed []int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.forward("lo"); err != nil {
		return err
	}
	a.names = slices.Clone(a.o.Interfaces)
	var nics []netlink.Link
	for _, name := range a.names {
		nic, err := a.prepare(name)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			a.o.Log.Warn("interface not found; it is attached when it exists", "interface", name)
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
			a.o.Log.Warn("interface not attached", "interface", name, "err", err)
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
func (a *attachments) prepare(name string) (netlink.Link, error) {
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
func (a *attachments) forward(name string) error {
	err := a.sysctls.Forward(name)
	if errors.Is(err, unix.EROFS) { // in a container; packets not forwarded are counted as no_forwarding
		a.o.Log.Warn("forwarding not switched on", "interface", name, "err", err,
			"fix", forwardFix(name))
		return nil
	}
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return nil
}

// forwardFix returns the command that does the same. It does not enable forwarding on other interfaces, which would
// turn an appliance into a router. In names of settings, sysctl writes a dot of an interface name as a slash.
func forwardFix(name string) string {
	name = strings.ReplaceAll(name, ".", "/")
	fix := fmt.Sprintf("sysctl -w net.ipv4.conf.%[1]s.forwarding=1 net.ipv6.conf.%[1]s.forwarding=1", name)
	if name == "lo" {
		fix += " net.ipv4.conf.lo.accept_local=1"
	}
	return fix
}

// exchange attaches the programs to one interface, replacing those that an earlier agent pinned. After Open, tc works
// alone where XDP cannot be attached, because it does everything that XDP does.
func (a *attachments) exchange(nic netlink.Link) error {
	name, fault := nic.Attrs().Name, ""
	hook, err := a.attachTC(nic, inward, outward)
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
		mode, fault = ModeTC, err.Error()+"; tc forwards alone"
	}
	a.index[name] = nic.Attrs().Index
	now := InterfaceStatus{Name: name, Mode: mode, Hook: hook, Fault: fault}
	if a.status[name] != now {
		a.o.Log.Info("interface attached", "interface", name, "mode", mode, "hook", hook, "reason", fault)
	}
	a.status[name] = now
	return a.o.inject("attach " + name)
}

// prune removes the links of interfaces that should have none.
func (a *attachments) prune() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	entries, err := os.ReadDir(filepath.Join(a.pins.Dir, "links"))
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
	var errs []error
	for _, e := range entries {
		wanted := slices.ContainsFunc(a.names, func(name string) bool {
			return strings.HasPrefix(e.Name(), pinName(name, ""))
		})
		if !wanted {
			errs = append(errs, a.unpin(e.Name()))
		}
	}
	return errors.Join(errs...)
}

// missing returns the names of these interfaces that are not in a.names. It leaves out interfaces other than Ethernet,
// because the programs expect an Ethernet header.
func (a *attachments) missing(indexes []int) (names []string) {
	for _, i := range indexes {
		l, ok := a.links[i]
		if ok && l.ethernet && !slices.Contains(a.names, l.name) && !slices.Contains(names, l.name) {
			names = append(names, l.name)
		}
	}
	slices.Sort(names)
	return names
}

// follow attaches the programs to these interfaces as well, because routes lead to them.
func (a *attachments) follow(indexes []int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, name := range a.missing(indexes) {
		nic, err := a.prepare(name)
		if err == nil {
			err = a.exchange(nic)
		}
		if err != nil {
			if a.notFollowed[name] != err.Error() { // the attempt is repeated
				a.o.Log.Error("interface not attached, to which routes lead", "interface", name, "err", err)
			}
			a.notFollowed[name] = err.Error()
			continue
		}
		delete(a.notFollowed, name)
		a.names = append(a.names, name)
		a.o.Log.Info("interface attached, because routes lead there", "interface", name)
	}
	a.need(indexes, time.Now())
}

// attachLo attaches the program that sends health checks to the servers of services with direct return.
func (a *attachments) attachLo() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.onLo {
		return nil
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("interface lo: %w", err)
	}
	if _, err := a.attachTC(lo, outward); err != nil {
		return fmt.Errorf("attach tc to lo: %w", err)
	}
	a.onLo = true
	return nil
}

// linkState is the part of an interface's state that matters to the verification.
type linkState struct {
	name     string
	index    int
	running  bool // up, with a carrier
	ethernet bool
	// noARP is set on an Ethernet interface when the kernel sends to the interface's own MAC address instead of
	// resolving the receiver's.
	noARP bool
}

func stateOf(nic netlink.Link) linkState {
	a := nic.Attrs()
	return linkState{
		name: a.Name, index: a.Index,
		running:  a.RawFlags&unix.IFF_UP != 0 && a.RawFlags&unix.IFF_RUNNING != 0,
		ethernet: a.EncapType == "ether",
		noARP: a.EncapType == "ether" && a.RawFlags&unix.IFF_NOARP != 0 &&
			!slices.Contains([]string{"dummy", "ipvlan", "vrf"}, nic.Type()), // their packets need no MAC address
	}
}

// readLinks rereads the interfaces from the kernel.
func (a *attachments) readLinks() error {
	nics, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list the interfaces: %w", err)
	}
	a.links = make(map[int]linkState, len(nics))
	for _, nic := range nics {
		a.links[nic.Attrs().Index] = stateOf(nic)
	}
	return nil
}
