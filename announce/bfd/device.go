package bfd

import (
	"errors"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// deviceInterval is the time between lookups of devices. A device that was deleted and created again has a new index,
// and sockets bound to the old index receive nothing.
const deviceInterval = time.Second

// A child process has copies of this process's sockets until it executes its program, so the port can stay in use for a
// moment after a previous Run.
const (
	bindRetries = 20
	bindRetry   = 10 * time.Millisecond
)

// device is an interface or VRF, with the sockets that are bound to it and receive its packets. The device of sessions
// without one has only sockets, which receive all other packets except those from VRFs.
type device struct {
	index     int // 0 if the device does not exist
	vrf       int // index of its VRF, its own if it is one, or 0
	listeners []listener
	err       error // why there are no listeners
}

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

// bindDevices binds sockets to the sessions' devices. m.mu is held.
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
	// The same port can be bound both with and without a device only if all its sockets allow reuse. They do so only
	// here, because otherwise another program could bind the port unnoticed.
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
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, value)
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

// arrivesOn reports whether a packet arrived on the session's device. If a VRF and an interface in it are both devices,
// sockets of either may have received it.
func (s *session) arrivesOn(p *datagram) bool {
	if s.Device == "" {
		return p.device.vrf == 0
	}
	index := s.device.index
	return index != 0 && (index == p.ifindex || index == p.device.index || index == p.device.vrf)
}
