package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// Info describes the agent: the response of /v1/status.
type Info struct {
	Verdict         Verdict        `json:"verdict"`            // OK, DEGRADED or DOWN
	Findings        []lb.Finding   `json:"findings"`           // the most severe first; the verdict follows from them
	Reasons         []string       `json:"reasons"`            // texts of findings that degrade the verdict
	Warnings        []string       `json:"warnings,omitempty"` // texts of findings that do not
	Node            string         `json:"node"`
	Version         string         `json:"version"`
	Started         time.Time      `json:"started"`
	Config          string         `json:"config"`
	Loaded          time.Time      `json:"loaded,omitzero"`            // when the running configuration was loaded
	LoadError       string         `json:"load_error,omitempty"`       // why the last reload was rejected
	ConfirmUntil    time.Time      `json:"confirm_until,omitzero"`     // see Reloaded
	Settled         bool           `json:"settled"`                    // see lb.Status
	Behind          time.Time      `json:"behind,omitzero"`            // see lb.Status
	Services        int            `json:"services"`                   // frontends
	Healthy         int            `json:"services_healthy"`           // frontends with enough healthy backends
	DrainedServices int            `json:"services_drained,omitempty"` // frontends drained by the operator
	Backends        int            `json:"backends"`                   //
	BackendsUp      int            `json:"backends_healthy"`           //
	Routes          int            `json:"routes"`                     // VIPs
	Announced       int            `json:"routes_announced"`           // announced VIPs
	Peers           int            `json:"peers"`                      //
	PeersUp         int            `json:"peers_established"`          //
	Interfaces      []Interface    `json:"interfaces"`                 //
	Drained         *lb.Drains     `json:"drained,omitempty"`          // nil if nothing is
	Weights         []lb.SetWeight `json:"weights,omitempty"`          // that an operator has set
	NeedRestart     []string       `json:"need_restart,omitempty"`     // changed sections that are read only at startup
	Cluster         *Cluster       `json:"cluster,omitempty"`          // nil if no cluster is configured
	Waiting         string         `json:"waiting,omitempty"`          // what startup waits for, or "" once complete
	Allocator       *Allocator     `json:"allocator,omitempty"`        // of "steelyard allocate", without services
	L2              bool           `json:"-"`                          // addresses are also announced by ARP and NDP
}

// Allocator describes a process that only assigns addresses.
type Allocator struct {
	Name string    `json:"name"`           // in the election, as Cluster.Leader
	Last string    `json:"last,omitempty"` // the last decision, or "" if there was none
	At   time.Time `json:"at,omitzero"`    // of the last decision
}

// Cluster is what the agent knows about its Kubernetes cluster.
type Cluster struct {
	Away   time.Time `json:"away,omitzero"`    // since when the API server has not answered, or zero
	Leader string    `json:"leader,omitempty"` // the node that assigns addresses, or "" if none or not known
}

// Interface is an interface that the datapath is attached to.
type Interface struct {
	Name string `json:"interface"`
	Mode string `json:"mode"` // xdp, xdp-generic or tc
	Hook string `json:"hook"` // tcx or clsact
	Err  string `json:"reason,omitempty"`
	Down bool   `json:"down,omitempty"` // it was set down, or has no carrier
}

// Options are the inputs of a Server. Fields are required unless their comments say otherwise.
type Options struct {
	Now    func() time.Time // time.Now if nil
	Socket string           // path of the unix socket
	Listen string           // "" for no TCP
	Hosts  []string         // accepted host names over TCP, besides addresses and "localhost"
	Access Access           // over TCP; SetAccess changes it
	// TLSCert and TLSKey are PEM files for TCP. If they are empty, there is no TLS.
	TLSCert, TLSKey string
	// Problem is called with the error of a socket, or nil when it is open.
	Problem func(part string, err error)
	Status  func(context.Context) (lb.Status, error)
	// StatusOf returns the status with only the services and the route of one VIP.
	StatusOf func(context.Context, netip.Addr) (lb.Status, error)
	Peers    func() []lb.PeerStatus
	Members  func() []lb.MemberStatus // may be nil
	// Sent returns the routes sent to a BGP peer, or false if there is no such peer.
	Sent func(peer netip.Addr) ([]lb.SentRoute, bool)
	// Flows lists flows. more means that there are more than the limit, or that the context ended the walk.
	Flows func(context.Context, lb.FlowFilter) (flows []lb.FlowStatus, more bool, err error)
	// EndFlows ends flows, and returns how many. It keeps flows with direct return.
	EndFlows func(context.Context, lb.FlowFilter) (ended, kept int, err error)
	// Explain returns what the datapath would do with a packet.
	Explain func(lb.Question) (lb.Explanation, error)
	// Trace passes packets to emit until the context ends or emit fails. It calls emit 50 times per second, at first
	// with an empty batch. Its error is lb.ErrTracing if another trace is running.
	Trace func(ctx context.Context, f lb.TraceFilter, emit func([]lb.TraceEvent) error) error
	// Rules returns what this node does as service proxy. It is nil if the agent is none.
	Rules func() []lb.NodeRule
	// Drain drains or undrains a target. It returns all drains.
	Drain func(ctx context.Context, t lb.DrainTarget, on bool) (lb.Drains, error)
	// SetWeight sets the weight of a server, or as configured if it is negative. It returns all weights.
	SetWeight func(ctx context.Context, t lb.DrainTarget, weight int) (lb.Drains, error)
	// Waiting returns the services that wait for an address. It may be nil.
	Waiting func() []lb.ServiceStatus
	// Reload reads the configuration file again. Its error has one line for each problem of a rejected file. force is
	// the word that permits a change that is otherwise refused, or "".
	Reload func(force string) (Reloaded, error)
	// Diff returns what a reload of the configuration file would change, or, with a name, what text would change
	// instead of that file.
	Diff func(name string, text []byte) (Reloaded, error)
	// Apply is like Reload with text, which then replaces the file. If within is not 0, it replaces the file once
	// Confirm is called, and the previous configuration becomes active again if this does not happen within this time.
	// name is that of the operator's file.
	Apply   func(name string, text []byte, force string, within time.Duration) (Reloaded, error)
	Confirm func() (Reloaded, error)
	Proxy   Proxy // nil without a cluster
	// Examine runs the checks of "steelyard doctor". It is nil while the agent waits for its network.
	Examine func(context.Context, lb.Status) []lb.Diagnosis
	// Text returns the text of the active configuration file.
	Text func() string
	// Events returns events, like events.History.After.
	Events func(n int, f events.Filter) (after []events.Event, total int, changed <-chan struct{})
	// Restart ends the agent so that a new one follows. On an error, which is like Reload's, the running agent
	// continues.
	Restart func() error
	// Info returns the fields that do not follow from Status and Peers.
	Info    func() Info
	Metrics http.Handler
	// Boundary surrounds each request. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
}

// Server serves the API.
type Server struct {
	o             Options
	access        atomic.Pointer[Access]
	walking       chan struct{} // has an element while someFlows walks
	examining     chan struct{} // has an element while examine runs
	retry         time.Duration // between two attempts to listen
	watchInterval time.Duration
}

// New returns a Server that does not listen yet.
func New(o Options) *Server {
	s := &Server{
		o: o, walking: make(chan struct{}, 1), examining: make(chan struct{}, 1), retry: listenRetry,
		watchInterval: watchInterval,
	}
	s.SetAccess(o.Access)
	return s
}

// engineTimeout bounds a request to the engine. A snapshot takes milliseconds; an engine that takes longer than this is
// stuck.
const engineTimeout = 2 * time.Second

// Handler returns the API. Without writable it has only the requests that change nothing.
func (s *Server) Handler(writable bool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/events", s.events(writable))
	if writable {
		mux.HandleFunc("POST /v1/drain", s.asUser(s.drain(true)))
		mux.HandleFunc("POST /v1/undrain", s.asUser(s.drain(false)))
		mux.HandleFunc("POST /v1/flows/end", s.asUser(s.endFlows))
		mux.HandleFunc("POST /v1/weight", s.asUser(s.setWeight))
		mux.HandleFunc("POST /v1/reload", s.asUser(s.reload))
		mux.HandleFunc("POST /v1/apply", s.asUser(asOwner(s.apply)))
		mux.HandleFunc("POST /v1/confirm", s.asUser(s.confirm))
		mux.HandleFunc("POST /v1/restart", s.asUser(s.restart))
		mux.HandleFunc("GET /v1/trace", s.asUser(s.trace))
		mux.HandleFunc("GET /v1/diff", s.diff)
		mux.HandleFunc("POST /v1/diff", s.diff)
		mux.HandleFunc("GET /v1/proxy", s.proxy(proxyState))
		mux.HandleFunc("GET /v1/proxy/diff", s.proxy(proxyDiff))
		mux.HandleFunc("POST /v1/proxy/take", s.asUser(s.proxy(proxyTake)))
		mux.HandleFunc("POST /v1/proxy/give-back", s.asUser(s.proxy(proxyGiveBack)))
		mux.HandleFunc("GET /v1/doctor", s.examine)
		mux.HandleFunc("GET /v1/config", func(w http.ResponseWriter, _ *http.Request) {
			write(w, http.StatusOK, Text{s.o.Text()})
		})
	}
	mux.HandleFunc("GET /v1/status", s.respond(func(st lb.Status) any { return s.info(st) }))
	mux.HandleFunc("GET /v1/services", s.listServices)
	mux.HandleFunc("GET /v1/backends", s.respond(func(st lb.Status) any { return listOf(st.Backends) }))
	mux.HandleFunc("GET /v1/routes", s.routes)
	mux.HandleFunc("GET /v1/peers", s.listPeers)
	mux.HandleFunc("GET /v1/members", s.listMembers)
	mux.HandleFunc("GET /v1/flows", s.flowsOver(writable))
	mux.HandleFunc("GET /v1/explain", s.explain)
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.Handle("GET /metrics", s.o.Metrics)
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { writePage(w, http.StatusOK) })
	return protected(mux)
}

func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	if st, ok := s.statusOf(w, r, netip.Addr{}); ok {
		write(w, http.StatusOK, map[string]bool{"healthy": true, "settled": st.Settled})
	}
}

// statusOf returns the status of a VIP, or of none for the zero address. It writes the error if there is one.
func (s *Server) statusOf(w http.ResponseWriter, r *http.Request, vip netip.Addr) (lb.Status, bool) {
	ctx, cancel := context.WithTimeout(r.Context(), engineTimeout)
	defer cancel()
	st, err := s.o.StatusOf(ctx, vip)
	if err != nil {
		writeError(w, http.StatusServiceUnavailable, err)
	}
	return st, err == nil
}

// respond returns a handler that writes f(status) as JSON, with the engine's status.
func (s *Server) respond(f func(lb.Status) any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), engineTimeout)
		defer cancel()
		st, err := s.o.Status(ctx)
		if err != nil {
			writeError(w, http.StatusServiceUnavailable, err)
			return
		}
		write(w, http.StatusOK, f(st))
	}
}

// routes lists the addresses, or, with ?peer=, the routes sent to a BGP peer.
func (s *Server) routes(w http.ResponseWriter, r *http.Request) {
	if !r.URL.Query().Has("peer") {
		s.respond(func(st lb.Status) any { return listOf(st.Routes) })(w, r)
		return
	}
	var list []lb.SentRoute
	if !ofPeer(w, r, func(peer netip.Addr) (ok bool) {
		list, ok = s.o.Sent(peer)
		return ok
	}) {
		return
	}
	write(w, http.StatusOK, listOf(list))
}

// listOf returns a list that is not null in JSON, because clients iterate over it.
func listOf[T any](all []T) []T {
	if all == nil {
		return []T{}
	}
	return all
}

func write(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if text, err := json.MarshalIndent(v, "", "  "); err == nil {
		w.Write(append(printable.JSON(text), '\n'))
	}
}

func writeError(w http.ResponseWriter, status int, err error) {
	write(w, status, map[string]string{"error": err.Error()})
}

// ofPeer calls find with the address in ?peer=, and writes the error if there is no such peer.
func ofPeer(w http.ResponseWriter, r *http.Request, find func(netip.Addr) bool) (ok bool) {
	peer, err := netip.ParseAddr(r.URL.Query().Get("peer"))
	switch {
	case err != nil:
		writeError(w, http.StatusBadRequest, fmt.Errorf("peer %q: want an address", r.URL.Query().Get("peer")))
	case !find(peer):
		writeError(w, http.StatusNotFound, fmt.Errorf("there is no BGP peer %v", peer))
	default:
		return true
	}
	return false
}

// listPeers lists the BGP peers, or, with ?peer=, only this one.
func (s *Server) listPeers(w http.ResponseWriter, r *http.Request) {
	list := s.peers()
	if r.URL.Query().Has("peer") && !ofPeer(w, r, func(peer netip.Addr) bool {
		list = slices.DeleteFunc(list, func(p lb.PeerStatus) bool { return p.Peer != peer })
		return len(list) > 0
	}) {
		return
	}
	s.respond(func(lb.Status) any { return list })(w, r)
}

func (s *Server) peers() []lb.PeerStatus { return listOf(s.o.Peers()) }

func (s *Server) info(st lb.Status) Info {
	i := s.o.Info()
	i.Settled, i.Behind = st.Settled, st.Behind
	i.Interfaces = listOf(i.Interfaces)
	for _, x := range st.Services {
		i.Services++
		drained := i.Drained != nil && (i.Drained.Node || slices.Contains(i.Drained.Services, x.Service))
		i.DrainedServices += one(drained)
		i.Healthy += one(x.State == lb.StateHealthy && !drained)
	}
	for _, x := range st.Backends {
		i.Backends++
		i.BackendsUp += one(x.State == lb.StateHealthy)
	}
	for _, x := range st.Routes {
		i.Routes++
		i.Announced += one(x.Announced)
	}
	peers := slices.DeleteFunc(s.o.Peers(), func(p lb.PeerStatus) bool {
		return p.Dynamic && p.State != established // it is not configured, so nobody expects it
	})
	i.Peers = len(peers)
	for _, x := range peers {
		i.PeersUp += one(x.State == established)
	}
	i.judge(st, peers, s.now())
	return i
}

// CurrentInfo returns what /v1/status shows. It fails if the engine does not respond in time.
func (s *Server) CurrentInfo(ctx context.Context) (Info, error) {
	st, err := s.o.Status(ctx)
	if err != nil {
		return Info{}, err
	}
	return s.info(st), nil
}

func (s *Server) now() time.Time {
	if s.o.Now != nil {
		return s.o.Now()
	}
	return time.Now()
}

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	q, err := lb.ParseQuestion(r.URL.Query().Get("client"), r.URL.Query().Get("to"))
	if err != nil {
		writeError(w, http.StatusBadRequest, err)
		return
	}
	e, err := s.o.Explain(q)
	if err != nil {
		writeError(w, http.StatusInternalServerError, err)
		return
	}
	if e.Scope == lb.ScopeInside || e.Scope == lb.ScopeNode { // no route leads there
		write(w, http.StatusOK, e)
		return
	}
	if st, ok := s.statusOf(w, r, e.Address); ok {
		e.Surround(st, s.peers())
		write(w, http.StatusOK, e)
	}
}

func (s *Server) drain(on bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), engineTimeout)
		defer cancel()
		q := r.URL.Query()
		t := lb.DrainTarget{Service: q.Get("service")}
		var err error
		switch { // a missing name must not drain the node, and a missing address not the service
		case (t.Service == "") != (q.Get("node") == "true"):
			err = errors.New("want either service=NAME or node=true")
		case q.Has("backend") && t.Service == "":
			err = errors.New("want service=NAME with backend=ADDRESS")
		case q.Has("backend"):
			t.Address, err = serverAddress(q.Get("backend"))
		}
		if err != nil {
			writeError(w, http.StatusBadRequest, err)
			return
		}
		now, err := s.o.Drain(ctx, t, on)
		if err != nil {
			writeError(w, http.StatusBadRequest, err)
			return
		}
		write(w, http.StatusOK, now)
	}
}
