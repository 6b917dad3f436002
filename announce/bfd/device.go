package bfd

import (
	"errors"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// deviceInterval is how often devices are looked up. A device that was removed and added again has a new index, and
// sockets bound to the old one no longer receive anything.
const deviceInterval = time.Second

// A child process that is just starting holds copies of closed sockets until it executes its program, so the port can
// stay in use for a moment after a previous Run has ended.
const (
	bindRetries = 20
	bindRetry   = 10 * time.Millisecond
)

// device is an interface or VRF with the sockets bound to it, which receive packets that arrive on it. For sessions
// without a device it is zero except for its listeners, which receive everything else, but nothing from a VRF.
type device struct {
	index     int // 0 if it does not exist
	vrf       int // index of the VRF that it is or is in, or 0
	listeners []listener
	err       error // why it has no listeners
}

// open opens the sockets that are not bound to a device.
func (m *Monitor) open() error {
	d := &device{}
	for range bindRetries {
		if d.listeners, d.err = listen(""); !errors.Is(d.err, unix.EADDRINUSE) {
			break
		}
		d.close()
		time.Sleep(bindRetry)
	}
	if d.err != nil {
		d.close()
		return d.err
	}
	m.devices[""] = d
	return nil
}

func (d *device) close() {
	for _, l := range d.listeners {
		_ = unix.Close(l.fd)
	}
	d.listeners = nil
}

func (m *Monitor) closeDevices() {
	for _, d := range m.devices {
		d.close()
	}
}

// bindDevices binds sockets to the devices of the sessions. m.mu is held.
func (m *Monitor) bindDevices(now time.Time) {
	if now.Sub(m.lookedUp) < deviceInterval {
		return
	}
	m.lookedUp, m.before = now, m.dropped()
	wanted := map[string]bool{"": true}
	for _, s := range m.sessions {
		wanted[s.Device] = true
	}
	for name, d := range m.devices {
		if !wanted[name] {
			d.close()
			delete(m.devices, name)
		}
	}
	for name := range wanted {
		if name != "" {
			m.bindDevice(name)
		}
	}
	for _, s := range m.sessions {
		s.device = m.devices[s.Device]
	}
}

func (m *Monitor) bindDevice(name string) {
	index, vrf := lookupDevice(name)
	d := m.devices[name]
	if d == nil {
		d = &device{}
		m.devices[name] = d
	}
	if index != d.index {
		for _, s := range m.sessions {
			if s.Device == name {
				s.closeSocket()
			}
		}
		d.close()
	}
	d.index, d.vrf = index, vrf
	if d.listeners != nil {
		return
	}
	// A port can be bound both with and without a device only if all sockets allow reuse. They allow it at no other
	// time, so that another program cannot bind the port unnoticed.
	for _, l := range m.devices[""].listeners {
		reuse(l.fd, true)
		defer reuse(l.fd, false)
	}
	m.filtered = false
	if d.listeners, d.err = listen(name); d.err != nil {
		d.close()
	}
}

func reuse(fd int, on bool) {
	value := 0
	if on {
		value = 1
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, value) // cannot fail on a socket
}

func lookupDevice(name string) (index, vrf int) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return 0, 0
	}
	a := link.Attrs()
	switch {
	case link.Type() == "vrf":
		vrf = a.Index
	case a.Slave != nil && a.Slave.SlaveType() == "vrf":
		vrf = a.MasterIndex
	}
	return a.Index, vrf
}

// arrivesOn reports whether a packet has arrived on the session's device. If both a VRF and an interface in it are
// devices, the sockets of either may have received it.
func (s *session) arrivesOn(p *datagram) bool {
	if s.Device == "" {
		return p.device.vrf == 0
	}
	index := s.device.index
	return index != 0 && (index == p.ifindex || index == p.device.index || index == p.device.vrf)
}
