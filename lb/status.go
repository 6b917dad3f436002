package lb

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Status is the state of the engine. The API, the metrics and the command line are built from it. The field names are a
// contract with users (docs/api.md).
type Status struct {
	Services []ServiceStatus `json:"services"`
	Backends []BackendStatus `json:"backends"`
	Routes   []RouteStatus   `json:"routes"`
	// Settled is false from the start of the agent until every source is complete and every service has had a plan.
	Settled bool `json:"settled"`
	// Behind is when the kernel began to lack a wanted frontend or an update of one, or zero if it lacks none.
	Behind time.Time `json:"behind,omitzero"`
}

// ServiceStatus is one frontend of a service.
type ServiceStatus struct {
	Service   string          `json:"service"`
	Address   netip.Addr      `json:"address"`
	Port      uint16          `json:"port"`
	LastPort  uint16          `json:"last_port,omitempty"` // of a range that begins with port
	Protocol  Protocol        `json:"protocol"`
	Policy    Policy          `json:"policy"`
	Forward   Method          `json:"forward"` // tunnel if other nodes may be chosen, which then deliver with nat
	Algorithm Algorithm       `json:"algorithm"`
	Backends  []BackendStatus `json:"backends"`
	// State is healthy if the address may be announced and the port has enough backends for that.
	State     State  `json:"state"`
	Announced bool   `json:"announced"`
	Reason    string `json:"reason,omitempty"` // why not announced, or why the port is not healthy
	Traffic
}

func (s *ServiceStatus) Frontend() Frontend {
	return Frontend{VIP: s.Address, Port: s.Port, Last: s.LastPort, Protocol: s.Protocol}
}

// NoneHealthy reports whether the address is announced and no backend of this port is healthy. It is false for a port
// without backends, because the Service itself says so.
func (s *ServiceStatus) NoneHealthy() bool {
	return s.Announced && s.State == StateUnhealthy && len(s.Backends) > 0 &&
		!slices.ContainsFunc(s.Backends, func(b BackendStatus) bool { return b.State == StateHealthy })
}

// BackendStatus is one backend of a service, at one of the checked ports.
type BackendStatus struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port"`
	Weight  int        `json:"weight"`
	State   State      `json:"state"`
	Reason  string     `json:"reason,omitempty"` // from its check's last result, or that an operator drained it
	Since   time.Time  `json:"since,omitzero"`   // when it entered the state
	ProbeTimes
	// Median and 95th percentile of the handshakes of about the last minute in seconds, estimated; nat only.
	Handshake50 float64          `json:"handshake_p50_seconds,omitzero"`
	Handshake95 float64          `json:"handshake_p95_seconds,omitzero"`
	Traffic                      // of all services that use these ports of the server
	Key         CheckKey         `json:"-"`
	Serves      []netip.AddrPort `json:"-"` // where it receives the packets of the ports that the check applies to
}

// RouteStatus is the announcement of one VIP.
type RouteStatus struct {
	Address   netip.Addr      `json:"address"`
	Services  []string        `json:"services"`
	By        []AnnouncerKind `json:"by,omitempty"` // from the engine; empty means every announcer that is on
	Announced bool            `json:"announced"`
	State     RouteState      `json:"state"`
	Reason    string          `json:"reason,omitempty"` // why not announced, or with a lower preference
	Since     time.Time       `json:"since,omitzero"`   // when announced or withdrawn
	// Intended means that the route is not announced because it is drained, other nodes of the cluster announce it, or
	// a Service has no endpoints; or that other nodes should be preferred (NoEndpointHere).
	Intended bool `json:"intended,omitempty"`
}

// RouteState is whether traffic to a VIP may be sent to this node.
type RouteState string

const (
	RouteAnnounced RouteState = "announced"
	RouteOffered   RouteState = "offered" // to be announced, but no peer receives it
	RouteWithheld  RouteState = "withheld"
)

// MarkOffered marks routes that no peer receives as offered. reason says why none does, or returns "" if one does.
func (out *Status) MarkOffered(reason func(RouteStatus) string) {
	offered := map[netip.Addr]string{}
	for i, r := range out.Routes {
		if !r.Announced {
			continue
		}
		if why := reason(r); why != "" {
			out.Routes[i].State, out.Routes[i].Announced, out.Routes[i].Reason = RouteOffered, false, why
			offered[r.Address] = why
		}
	}
	for i, row := range out.Services {
		if why, ok := offered[row.Address]; ok {
			out.Services[i].Announced, out.Services[i].Reason = false, cmp.Or(row.Reason, why)
		}
	}
}

// PeerStatus is one BGP neighbour.
type PeerStatus struct {
	Peer      netip.Addr `json:"peer"`
	Interface string     `json:"interface,omitempty"` // of an unnumbered peer; Peer is ::%interface until found
	// Dynamic means that the peer connected from a listen_range, as any host that can reach this node may.
	Dynamic   bool      `json:"dynamic,omitempty"`
	ASN       uint32    `json:"asn"`
	State     string    `json:"state"`  // idle, connect, active, opensent, openconfirm, established
	Routes    int       `json:"routes"` // announced to the neighbour
	Since     time.Time `json:"since,omitzero"`
	LastError string    `json:"reason,omitempty"` // why it is not established, or what is wrong
	// Received is how many routes the neighbour has sent in this session. They are discarded.
	Received uint64 `json:"received,omitempty"`
	// Errors lists the last errors, including those of previous sessions, newest first.
	Errors []PeerError `json:"errors,omitempty"`
	BFD    string      `json:"bfd,omitempty"` // up, or down and why; empty: not configured
	// Flaps is how many sessions have ended since the agent started.
	Flaps   uint64       `json:"flaps"`
	Session *PeerSession `json:"session,omitempty"` // while it is established
}

// PeerSession describes what an established session has negotiated and exchanged so far.
type PeerSession struct {
	Local    netip.Addr `json:"local"` // address of this node
	LocalASN uint32     `json:"local_asn"`
	RouterID netip.Addr `json:"router_id"` // the neighbour's
	// Hold and Keepalive are in seconds. 0 means that no KEEPALIVEs are sent.
	Hold            float64  `json:"hold_seconds"`
	Keepalive       float64  `json:"keepalive_seconds"`
	Families        []string `json:"families"` // ipv4, ipv6
	ExtendedNextHop bool     `json:"extended_next_hop,omitempty"`
	// Restart and LongLived are how many seconds the neighbour keeps the routes after the session has failed: first
	// with graceful restart, then with long-lived graceful restart. 0 means not negotiated.
	Restart   float64      `json:"restart_seconds"`
	LongLived float64      `json:"long_lived_seconds"`
	Sent      PeerMessages `json:"sent"`
	Received  PeerMessages `json:"received"`
}

// PeerMessages counts BGP messages in one direction, including OPEN.
type PeerMessages struct {
	Messages uint64    `json:"messages"`
	Updates  uint64    `json:"updates"`
	Last     time.Time `json:"last"`
}

// PeerError says why a session ended or did not come up.
type PeerError struct {
	At   time.Time `json:"at"` // when it last occurred
	Text string    `json:"text"`
}

// SentRoute is a route as last sent to a BGP neighbour in the current session. Attributes missing from the UPDATE are
// empty.
type SentRoute struct {
	Prefix              netip.Prefix `json:"prefix"`
	NextHop             netip.Addr   `json:"next_hop"`
	ASPath              []uint32     `json:"as_path"`
	MED                 *uint32      `json:"med,omitempty"`
	LocalPref           *uint32      `json:"local_pref,omitempty"`
	Communities         []string     `json:"communities,omitempty"`
	LargeCommunities    []string     `json:"large_communities,omitempty"`
	ExtendedCommunities []string     `json:"extended_communities,omitempty"` // without the link bandwidth
	Bandwidth           float64      `json:"bandwidth,omitempty"`            // of the link, in bytes per second
	At                  time.Time    `json:"at"`
}

// statusChunk is how many services or routes one query of Status reads, which delays changes by about a millisecond.
const statusChunk = 100

// Status returns the state of the engine. Each service and each route is consistent, but they are not all from the same
// moment. It fails only if ctx ends before the engine's goroutine has handled the queries.
func (e *Engine) Status(ctx context.Context) (Status, error) {
	out := &Status{Services: []ServiceStatus{}, Backends: []BackendStatus{}, Routes: []RouteStatus{}}
	var names []string
	var vips []netip.Addr
	err := e.do(ctx, func() {
		out.Settled, out.Behind = e.isSettled(), e.datapath.behind
		names, vips = slices.Collect(maps.Keys(e.services)), slices.Collect(maps.Keys(e.routes.claims))
	})
	if err != nil {
		return Status{}, err
	}
	slices.Sort(names)
	slices.SortFunc(vips, netip.Addr.Compare)
	var refused []*Service
	for some := range slices.Chunk(names, statusChunk) {
		var views []serviceView
		err := e.do(ctx, func() {
			for _, name := range some {
				if en, ok := e.services[name]; ok {
					views = append(views, e.view(en))
				}
			}
		})
		if err != nil {
			return Status{}, err
		}
		for _, v := range views {
			e.o.Boundary.Do(PartStatus, v.service.Name, func() { out.add(v) })
			if len(v.service.Refused) > 0 {
				refused = append(refused, v.service)
			}
		}
	}
	for some := range slices.Chunk(vips, statusChunk) {
		err := e.do(ctx, func() {
			for _, addr := range some {
				if _, ok := e.routes.claims[addr]; ok {
					out.Routes = append(out.Routes, e.routes.status(addr))
				}
			}
		})
		if err != nil {
			return Status{}, err
		}
	}
	out.addRefused(refused)
	for some := range slices.Chunk(out.Routes, statusChunk) {
		if err := e.do(ctx, func() { e.markIntended(some) }); err != nil {
			return Status{}, err
		}
	}
	return *out, nil
}

// StatusOf is like Status, but with only one VIP's services and route. Its cost depends on them, apart from a short
// test of each service.
func (e *Engine) StatusOf(ctx context.Context, vip netip.Addr) (Status, error) {
	out := &Status{Services: []ServiceStatus{}, Backends: []BackendStatus{}, Routes: []RouteStatus{}}
	var views []serviceView
	var refused []*Service
	err := e.do(ctx, func() {
		out.Settled, out.Behind = e.isSettled(), e.datapath.behind
		for _, c := range e.routes.claims[vip] {
			views = append(views, e.view(e.services[c.service]))
		}
		if len(e.routes.claims[vip]) > 0 {
			out.Routes = append(out.Routes, e.routes.status(vip))
		}
		for _, en := range e.services {
			if slices.ContainsFunc(en.service.Refused, func(r RefusedVIP) bool { return r.VIP == vip }) {
				refused = append(refused, en.service)
			}
		}
	})
	if err != nil {
		return Status{}, err
	}
	for _, v := range views {
		e.o.Boundary.Do(PartStatus, v.service.Name, func() { out.add(v) })
	}
	out.addRefused(refused)
	out.Services = slices.DeleteFunc(out.Services, func(s ServiceStatus) bool { return s.Address != vip })
	out.Routes = slices.DeleteFunc(out.Routes, func(r RouteStatus) bool { return r.Address != vip })
	if err := e.do(ctx, func() { e.markIntended(out.Routes) }); err != nil {
		return Status{}, err
	}
	return *out, nil
}

// serviceView is a snapshot from which a service's status is computed. The engine's goroutine takes it, and the caller
// computes the status, because a service may have many backends.
type serviceView struct {
	entry
	routes  map[netip.Addr]RouteStatus
	reasons map[Frontend]string // why the datapath lacks wanted frontends
}

func (e *Engine) view(en *entry) serviceView {
	v := serviceView{
		entry{en.service, maps.Clone(en.health), en.plan, en.given}, map[netip.Addr]RouteStatus{},
		map[Frontend]string{},
	}
	for _, vip := range en.service.VIPs {
		v.routes[vip] = e.routes.status(vip)
		for _, p := range en.service.Ports {
			if why := e.datapath.reason(p.On(vip)); why != "" {
				v.reasons[p.On(vip)] = why
			}
		}
	}
	return v
}

// add adds a service and its backends to a status.
func (out *Status) add(v serviceView) {
	backends := v.backendStatus()
	services := v.status(backends)
	out.Backends, out.Services = append(out.Backends, backends...), append(out.Services, services...)
}

func (e *Engine) do(ctx context.Context, f func()) error {
	_, err := query(ctx, e, func() struct{} { f(); return struct{}{} })
	return err
}

func (v serviceView) status(backends []BackendStatus) []ServiceStatus {
	s := v.service
	row, i := make(map[CheckKey]BackendStatus, len(backends)), 0
	s.eachChecked(func(key CheckKey, _ Backend) { row[key], i = backends[i], i+1 })
	var rows []ServiceStatus
	for _, vip := range s.VIPs {
		route := v.routes[vip]
		for _, p := range s.Ports {
			x := ServiceStatus{
				Service: s.Name, Address: vip, Port: p.Port.Port, LastPort: p.Last, Protocol: p.Protocol,
				Policy: s.Policy, Forward: s.forward(), Algorithm: s.Algorithm, Announced: route.Announced,
				Backends: make([]BackendStatus, 0, len(p.Backends)),
			}
			for _, b := range p.Backends {
				if s.serves(vip, b) && !b.Deleted {
					x.Backends = append(x.Backends, row[keyOf(s, b, p.Port)])
				}
			}
			var reason string
			x.State, reason = v.stateOf(vip, p)
			x.Reason = v.reasons[p.On(vip)]
			if x.Reason == "" && (!route.Announced || x.State == StateUnhealthy) {
				x.Reason = cmp.Or(reason, route.Reason)
			}
			rows = append(rows, x)
		}
	}
	return rows
}

// stateOf returns the state of a service's port on a VIP, and why it is not healthy.
func (en *entry) stateOf(vip netip.Addr, p ServicePort) (State, string) {
	s := en.service
	if en.plan == nil {
		return StateUnknown, "waiting for the first health checks"
	}
	i := slices.IndexFunc(en.plan.VIPs, func(p VIPPlan) bool { return p.VIP == vip })
	if i < 0 { // the plan is for the previous addresses
		return StateUnknown, "its addresses have just changed"
	}
	switch reason := en.plan.VIPs[i].Reason; reason {
	case "":
	case drained:
		return StateDraining, reason
	default:
		return StateUnhealthy, reason
	}
	// The VIP may be announced for another port.
	usable, idle, _, _ := usableFor(s, p, vip, en.health)
	if reason := s.tooFew([]ServicePort{p}, vip, len(usable), idle); reason != "" {
		return StateUnhealthy, reason
	}
	return StateHealthy, ""
}

func (en *entry) backendStatus() []BackendStatus {
	var rows []BackendStatus
	s := en.service
	health, served := s.bounded(en.health), s.served()
	s.eachChecked(func(key CheckKey, b Backend) {
		h := health[key]
		port := b.On(key.Port).Port()
		if (key.Port == Port{}) {
			port = b.On(s.Check.ServicePort).Port()
		}
		row := BackendStatus{
			Service: s.Name, Address: b.Addr, Port: port, Weight: s.weight(b, h),
			State: StateOf(s, b, h), Reason: h.Reason, Since: h.At, Key: key, Serves: served[key],
		}
		if b.Drain && row.State == StateDraining && en.given != s && !en.given.drains(b) {
			row.Reason = drained
		} else if en.given != s && row.State == StateHealthy {
			if was := en.given.backends()[b.ID()].Weight; was != b.Weight {
				row.Reason = fmt.Sprintf("weight %s; configured: %d", weightSet, was)
			}
		}
		rows = append(rows, row)
	})
	return rows
}
