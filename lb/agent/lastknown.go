package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// lastKnown sits between the cluster source and the engine, and stores what the source passes on. If an agent starts
// while the API server does not answer, lastKnown passes on the stored state until the source has synced, because the
// control plane may need the addresses that this node announces.
type lastKnown struct {
	lb.Sink
	setNodes func([]netip.Addr) error
	away     func() time.Time // since when the API server has not answered, or zero if it answers
	file     *state.File
	log      *slog.Logger

	mu       sync.Mutex // guards all below; held during calls to Sink, to keep their order
	services map[string]*lb.Service
	nodes    []netip.Addr
	synced   bool            // the source has put all services
	live     bool            // the source has put something
	replayed map[string]bool // put from the file but not by the source
	stored   []*lb.Service   // from the file, as replayed
	dirty    bool
}

// clusterState is the content of the file.
type clusterState struct {
	Services []*lb.Service
	Nodes    []netip.Addr
}

// clusterStateVersion must be increased when a change of lb.Service changes the meaning of stored services.
const clusterStateVersion = 1

// clusterFile returns the file with the clusterState.
func clusterFile(dir string) *state.File { return state.New(dir, "cluster", clusterStateVersion) }

func newLastKnown(to lb.Sink, setNodes func([]netip.Addr) error, dir string, log *slog.Logger) *lastKnown {
	return &lastKnown{
		Sink: to, setNodes: setNodes, away: func() time.Time { return time.Time{} },
		file: clusterFile(dir), log: log,
		services: map[string]*lb.Service{}, replayed: map[string]bool{},
	}
}

// Put implements lb.Sink.
func (l *lastKnown) Put(s *lb.Service) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live, l.dirty = true, true
	l.services[s.Name] = s
	delete(l.replayed, s.Name)
	l.Sink.Put(s)
}

// Delete implements lb.Sink.
func (l *lastKnown) Delete(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live, l.dirty = true, true
	delete(l.services, name)
	delete(l.replayed, name)
	l.Sink.Delete(name)
}

// Complete implements lb.Sink. It deletes stored services that no longer exist.
func (l *lastKnown) Complete(source string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live, l.synced, l.dirty = true, true, true
	for name := range l.replayed {
		l.Sink.Delete(name)
	}
	clear(l.replayed)
	l.stored = nil
	l.Sink.Complete(source)
}

// tunnelSources takes the addresses of the nodes from the source.
func (l *lastKnown) tunnelSources(nodes []netip.Addr) error {
	l.mu.Lock()
	l.live, l.dirty = true, true
	l.nodes = slices.Clone(nodes)
	l.mu.Unlock()
	return l.setNodes(nodes)
}

// endpoints returns the endpoints of the service at an address and port, for apiDialer.
func (l *lastKnown) endpoints(address string) (all []string) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range slices.AppendSeq(slices.Clone(l.stored), maps.Values(l.services)) {
		if !slices.Contains(s.VIPs, at.Addr()) {
			continue
		}
		for _, p := range s.Ports {
			if p.Port.Port != at.Port() || p.Protocol != lb.TCP {
				continue
			}
			for _, b := range p.Backends {
				if to := b.On(p.Port).String(); !b.Deleted && !slices.Contains(all, to) {
					all = append(all, to)
				}
			}
		}
	}
	return all
}

// Times of lastKnown: how long startup waits for an API server that does not answer, and for a slow one, and how often
// changes are stored, plus one second per savedPerSecond services.
const (
	awayTimeout    = 3 * time.Second
	slowTimeout    = 30 * time.Second
	saveInterval   = 5 * time.Second
	savedPerSecond = 500
)

// run replays the stored state if needed, and stores changes until ctx ends.
func (l *lastKnown) run(ctx context.Context) error {
	start := time.Now()
	for next := start.Add(saveInterval); ; {
		select {
		case <-ctx.Done():
			l.save()
			return nil
		case <-time.After(time.Second):
		}
		now := time.Now()
		if waited := now.Sub(start); waited >= awayTimeout && !l.away().IsZero() || waited >= slowTimeout {
			l.replay()
		}
		if now.After(next) {
			next = now.Add(saveInterval + time.Duration(l.save()/savedPerSecond)*time.Second)
		}
	}
}

// replay puts the stored services, unless the source has put some or they have already been put.
func (l *lastKnown) replay() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.live || len(l.replayed) > 0 {
		return
	}
	var stored clusterState
	found, err := l.file.Load(&stored)
	if err != nil {
		l.log.Error("last known state of the cluster not read", "err", err)
	}
	if !found || err != nil || len(stored.Services) == 0 {
		l.live = true // nothing to replay
		return
	}
	if err := l.setNodes(stored.Nodes); err != nil {
		l.log.Error("tunnel sources not set", "err", err)
	}
	for _, s := range stored.Services {
		l.replayed[s.Name] = true
		l.Sink.Put(probedDirectly(s))
	}
	l.stored = stored.Services
	l.Sink.Complete(kube.Name)
	l.log.Warn("the API server does not answer; its last known state is used",
		"services", len(stored.Services), "file", l.file.Path())
}

// probedDirectly returns s with a TCP check, if its ports permit one, because no source says which endpoints still
// exist. It keeps a reason to withhold the addresses only if the reason is not a fault.
func probedDirectly(s *lb.Service) *lb.Service {
	out := *s
	if !s.WithholdIntended {
		out.WithholdReason = ""
	}
	out.Check = lb.ProbeDirectly(s)
	return &out
}

// save stores the cluster's state if it has changed, and returns the number of services.
func (l *lastKnown) save() int {
	l.mu.Lock()
	n := len(l.services)
	if !l.synced || !l.dirty {
		l.mu.Unlock()
		return n
	}
	l.dirty = false
	nodes := l.nodes
	services := slices.SortedFunc(maps.Values(l.services), func(a, b *lb.Service) int {
		return cmp.Compare(a.Name, b.Name)
	})
	l.mu.Unlock()
	if err := l.file.Write(func(w io.Writer) error { return writeState(w, services, nodes) }); err != nil {
		l.log.Warn("state of the cluster not stored; a start without the API server will announce nothing", "err", err)
	}
	return n
}

// writeState writes a clusterState as JSON, one service at a time, because encoding a large cluster as a whole takes as
// much memory as its services.
func writeState(w io.Writer, services []*lb.Service, nodes []netip.Addr) error {
	part := func(before string, v any) error {
		text, err := json.Marshal(v)
		if err == nil {
			_, err = fmt.Fprintf(w, "%s%s", before, text)
		}
		return err
	}
	if err := part(`{"Nodes":`, nodes); err != nil {
		return err
	}
	before, end := `,"Services":[`, "}\n"
	for _, s := range services {
		if err := part(before, s); err != nil {
			return err
		}
		before, end = ",", "]}\n"
	}
	_, err := io.WriteString(w, end)
	return err
}
