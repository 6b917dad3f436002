package bfd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/announce/loglimit"
	"github.com/steelyard-lb/steelyard/lb"
)

// Neighbor is a router to monitor. Compare neighbors with ==.
type Neighbor struct {
	Addr       netip.Addr // with a zone if it is link-local
	Source     netip.Addr // same family as Addr; if zero, the kernel chooses
	Device     string     // interface or VRF of the session; empty for any interface outside VRFs
	Multihop   bool
	MinTTL     uint8         // with Multihop, the lowest TTL of packets from the neighbor; 0 for any
	Interval   time.Duration // between packets in both directions, at least 10 ms
	Multiplier uint8         // lost packets after which the session fails, at least 1
}

// Status is the state of a session.
type Status struct {
	Neighbor   netip.Addr
	State      State
	Diag       Diag      // why the session was last down; DiagNone if it never was
	RemoteDiag Diag      // why the neighbor says it was last down
	Since      time.Time // of the last change of State
	NotUpSince time.Time // when it was last up, or added; zero if it is up
	BothUp     time.Time // last packet while both sides were up; zero if none
	Problem    string    // why packets cannot be sent, or ""
	Discarded  string    // why a packet from its address was discarded in the last 10 s, or ""
}

// Options configures a Monitor.
type Options struct {
	// Changed is called after each state change, from the goroutine of Run. It must neither block nor call the Monitor.
	// It may be nil.
	Changed func(before State, s Status)
	// Boundary wraps the handling of each packet. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
}

// Monitor maintains one session with each neighbor. All methods may be called from any goroutine.
type Monitor struct {
	o    Options
	wake int // eventfd

	mu        sync.Mutex // guards the following fields
	sessions  []*session
	devices   map[string]*device // by name, "" for sessions without one; only Run changes it
	lookedUp  time.Time          // last lookup of the devices; zero to repeat it before the next step
	last      uint32             // last assigned discriminator
	discarded map[string]uint64
	filtered  bool   // the sockets' filters match the sessions and their states
	flooded   bool   // a socket had maxDrain packets in the last step
	before    uint64 // result of dropped at lookedUp
}

// discardedTime is how long a session's status shows a discarded packet. A router whose packets are all discarded sends
// one per second.
const discardedTime = 10 * time.Second

type session struct {
	Neighbor
	*machine
	reported   State // the last state passed to Changed
	since      time.Time
	notUpSince time.Time
	problem    string
	discarded  string    // why the last packet was discarded, or ""
	refusedAt  time.Time // when the last packet was discarded
	limit      loglimit.Limit
	device     *device       // named Device; nil before the first step
	socket     int           // -1 if there is none
	sent, send time.Time     // the last and the next periodic packet
	tx         time.Duration // the interval on which send is based
	ifindex    int           // interface that leads to the neighbor, as of lookedUp, or 0
	lookedUp   time.Time
}

// New returns a Monitor without neighbors. It opens no network socket.
func New(o Options) (*Monitor, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	// The first discriminator is random, because packets for a previous process's discriminator may still arrive.
	return &Monitor{
		o: o, wake: fd, last: rand.Uint32(), devices: map[string]*device{}, discarded: map[string]uint64{},
	}, nil
}

// key returns the fields that identify a session. Other parameters can change during a session.
func (n Neighbor) key() Neighbor {
	n.MinTTL, n.Interval, n.Multiplier = 0, 0, 0
	return n
}

// serves reports whether this is the session with n. A new Source equal to the address that the kernel chose makes no
// difference.
func (s *session) serves(n Neighbor) bool {
	k := s.key()
	if !k.Source.IsValid() && n.Source.IsValid() && k.Addr == n.Addr {
		if r, ok := s.route(); ok {
			src, _ := netip.AddrFromSlice(r.Src)
			k.Source = src.Unmap()
		}
	}
	return k == n.key()
}

// Set replaces the neighbors. Sessions with remaining neighbors continue, even if Interval, Multiplier or MinTTL
// changes. Other sessions end as administratively down.
func (m *Monitor) Set(neighbors []Neighbor) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sessions = slices.DeleteFunc(m.sessions, func(s *session) bool {
		gone := !slices.ContainsFunc(neighbors, s.serves)
		if gone {
			s.close()
		}
		return gone
	})
	for _, n := range neighbors {
		i := slices.IndexFunc(m.sessions, func(s *session) bool { return s.serves(n) })
		if i >= 0 {
			if m.sessions[i].Source != n.Source {
				m.sessions[i].closeSocket() // the next socket is bound to the same address
			}
			m.sessions[i].Neighbor = n
			m.sessions[i].configure(n.Interval, n.Multiplier)
			continue
		}
		if m.last++; m.last == 0 {
			m.last = 1
		}
		m.lookedUp = time.Time{}
		now := time.Now()
		m.sessions = append(m.sessions, &session{
			Neighbor: n, machine: newMachine(m.last, n.Interval, n.Multiplier), reported: Down,
			since: now, notUpSince: now, socket: -1,
		})
	}
	m.filtered = false
	m.notify()
}

// Sessions returns the status of each session, in no particular order.
func (m *Monitor) Sessions() []Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]Status, len(m.sessions))
	for i, s := range m.sessions {
		list[i] = s.status()
	}
	return list
}

// Discarded returns the number of discarded packets, by reason.
func (m *Monitor) Discarded() map[string]uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make(map[string]uint64, len(m.discarded))
	for k, v := range m.discarded {
		out[k] = v
	}
	if n := m.dropped(); n > 0 {
		out["dropped by the kernel"] = n
	}
	return out
}

func (s *session) status() Status {
	st := Status{
		Neighbor: s.Addr, State: s.state, Diag: s.diag, RemoteDiag: s.remoteDiag, Since: s.since,
		NotUpSince: s.notUpSince, BothUp: s.bothUp, Problem: s.problem,
	}
	if time.Since(s.refusedAt) < discardedTime {
		st.Discarded = s.discarded
	}
	if st.Problem == "" && s.device != nil && s.device.err != nil {
		st.Problem = s.device.err.Error()
	}
	return st
}

// notify wakes Run. The write cannot fail, because Run resets the counter of the eventfd.
func (m *Monitor) notify() { _, _ = unix.Write(m.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

// Run sends and receives until ctx is done and then ends all sessions as administratively down. Call it once. It
// returns an error if it cannot open a receiving socket, for example because the port is in use.
//
// One thread does everything, in a fixed order: however late the thread is scheduled, it processes received packets
// before it checks detection times.
func (m *Monitor) Run(ctx context.Context) error {
	runtime.LockOSThread() // the thread, with its priority, ends with the goroutine
	if err := realTime(); err != nil {
		_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20)
		m.o.Log.Warn("running BFD without real-time priority (CAP_SYS_NICE)", "err", err)
	}
	if err := m.open(); err != nil {
		return err
	}
	defer m.closeDevices()
	stop := context.AfterFunc(ctx, m.notify)
	defer stop()
	for wait := time.Duration(0); ; {
		fds := []unix.PollFd{{Fd: int32(m.wake), Events: unix.POLLIN}}
		for _, d := range m.devices {
			for _, l := range d.listeners {
				fds = append(fds, unix.PollFd{Fd: int32(l.fd), Events: unix.POLLIN})
			}
		}
		if _, err := unix.Ppoll(fds, timespec(wait), nil); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("poll: %w", err)
		}
		if ctx.Err() != nil {
			m.Set(nil)
			return nil
		}
		var counter [8]byte
		_, _ = unix.Read(m.wake, counter[:])
		if wait = m.step(); m.flooded { // let other threads run
			_, _ = unix.Ppoll(fds[:1], timespec(time.Millisecond), nil)
		}
	}
}

// realTime gives this thread the lowest real-time priority, so it runs even if all CPUs are busy. Its child threads and
// processes have normal priority.
func realTime() error {
	return unix.SchedSetAttr(0, &unix.SchedAttr{
		Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Flags: unix.SCHED_FLAG_RESET_ON_FORK, Priority: 1,
	}, 0)
}

func timespec(d time.Duration) *unix.Timespec {
	ts := unix.NsecToTimespec(int64(max(d, 0)))
	return &ts
}

// step receives packets, expires sessions and sends due packets. It returns the time until the next step.
func (m *Monitor) step() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bindDevices(time.Now())
	m.flooded = false
	if !m.filtered {
		m.attach()
		m.filtered = true
	}
	for _, d := range m.devices {
		for _, l := range d.listeners {
			full := l.drain(func(p datagram) string {
				p.device = d
				return m.handle(p)
			}, func(reason string) { m.discarded[reason]++ })
			m.flooded = m.flooded || full
		}
	}
	now := time.Now()
	next := now.Add(time.Hour)
	for _, s := range m.sessions {
		s.expire(now)
		m.report(s, now)
		if !now.Before(s.send) {
			if s.periodic() {
				s.transmit(s.packet(false))
			}
			s.sent, s.tx = now, 0
		}
		if tx := s.txInterval(); tx != s.tx { // the neighbor may have changed the interval
			s.tx, s.send = tx, s.sent.Add(s.pause(rand.Float64()))
		}
		next = earlier(earlier(next, s.send), s.expires())
	}
	return time.Until(next)
}

// earlier returns the earlier of two times. A zero time means never.
func earlier(a, b time.Time) time.Time {
	if b.IsZero() || a.Before(b) {
		return a
	}
	return b
}

// report reports a state change. It is called after each packet, because the next packet may revert the change. The
// same step also notifies the neighbor.
func (m *Monitor) report(s *session, now time.Time) {
	before := s.reported
	if s.state == before {
		return
	}
	s.reported, s.since, s.send = s.state, now, now
	m.filtered = false
	switch Up {
	case s.state:
		s.notUpSince = time.Time{}
	case before:
		s.notUpSince = now
	}
	if left, ok := s.limit.Allow(s.since, fmt.Sprint(s.state, s.diag, s.remoteDiag)); ok {
		log := m.o.Log.With("neighbor", s.Addr)
		if s.Device != "" {
			log = log.With("device", s.Device)
		}
		if left > 0 {
			log = log.With("changes_not_logged", left)
		}
		if n := m.dropped(); before == Up && n > m.before {
			log = log.With("packets_dropped_by_the_kernel", n-m.before, "since", m.lookedUp)
		}
		log.Info("bfd session "+s.state.String(), "reason", s.diag, "remote_reason", s.remoteDiag)
	}
	if m.o.Changed != nil {
		m.o.Changed(before, s.status())
	}
}

func (m *Monitor) handle(d datagram) (reason string) {
	reason = "not handled"
	m.o.Boundary.Do(lb.PartBFD, d.from.String(), func() { reason = m.receive(d) })
	return reason
}

// receive applies a packet to its session (RFC 5880, section 6.8.6). While the session is up, it discards packets
// without our discriminator, because anybody can send them. A neighbor's restart is therefore detected only after the
// detection time.
func (m *Monitor) receive(d datagram) (reason string) {
	reason = "no session"
	for _, s := range m.sessions {
		if s.Addr.WithZone("") != d.from || s.Multihop != d.multihop {
			continue
		}
		if reason = s.refuse(&d); reason != "" {
			s.discarded, s.refusedAt = reason, time.Now()
			continue
		}
		s.discarded = ""
		now := time.Now()
		if s.machine.receive(d.Packet, now) {
			s.transmit(s.packet(true))
		}
		m.report(s, now)
		return ""
	}
	return reason
}

// refuse says why a packet from the neighbor's address does not belong to this session, or returns "".
func (s *session) refuse(d *datagram) string {
	switch {
	case !s.Multihop && d.ttl != maxTTL:
		return "TTL below 255"
	case s.Multihop && d.ttl < int(s.MinTTL):
		return "TTL below min_ttl"
	case !s.Multihop && !s.arrivesBy(d.ifindex):
		return "not from the interface of the neighbor"
	case s.Multihop && !s.arrivesOn(d):
		return "not from the device of the session"
	case d.YourDiscriminator == 0 && s.state == Up:
		return "no discriminator while up"
	case d.YourDiscriminator != 0 && d.YourDiscriminator != s.local:
		return "no session"
	}
	return ""
}
