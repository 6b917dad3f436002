package agent

import (
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// selection chooses this node's BGP peers: those whose node_selector matches its labels. The labels are stored, so that
// a node that starts without the API server still has its peers.
type selection struct {
	apply func(*config.Config) error // Speaker.Configure
	file  *state.File
	log   *slog.Logger
	now   atomic.Pointer[labels.Set] // the last argument of setLabels

	mu     sync.Mutex // guards all below
	cfg    *config.Config
	labels labels.Set // nil if not known
}

func newSelection(cfg *config.Config, keepDir string, log *slog.Logger) *selection {
	s := &selection{file: state.New(keepDir, "labels", 1), log: log, cfg: cfg}
	if _, err := s.file.Load(&s.labels); err != nil {
		log.Warn("labels of this node not read", "err", err)
		s.labels = nil
	}
	return s
}

// chosen returns cfg without the peers that belong to other nodes. Without Kubernetes, nodes have no labels, and chosen
// keeps all peers.
func (s *selection) chosen(cfg *config.Config) *config.Config {
	if cfg.BGP == nil || cfg.Kubernetes == nil {
		return cfg
	}
	b := *cfg.BGP
	b.Peers = slices.DeleteFunc(slices.Clone(b.Peers), func(p config.Peer) bool {
		if p.NodeSelector == "" {
			return false
		}
		selector, err := labels.Parse(p.NodeSelector)
		if err != nil {
			s.log.Error("peer excluded", "node_selector", p.NodeSelector, "err", err)
		}
		return err != nil || s.labels == nil || !selector.Matches(s.labels)
	})
	chosen := *cfg
	chosen.BGP = &b
	return &chosen
}

// configure applies a changed configuration.
func (s *selection) configure(cfg *config.Config) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cfg = cfg
	return s.apply(s.chosen(cfg))
}

// setLabels sets this node's labels. It does not wait for sessions to close.
func (s *selection) setLabels(now map[string]string) {
	set := labels.Set{}
	maps.Copy(set, now)
	s.now.Store(&set)
	go s.relabel()
}

func (s *selection) relabel() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := *s.now.Load()
	if s.labels != nil && maps.Equal(now, s.labels) {
		return
	}
	before := s.chosen(s.cfg)
	s.labels = now
	if err := s.file.Save(s.labels); err != nil {
		s.log.Warn("labels of this node not stored", "err", err)
	}
	after := s.chosen(s.cfg)
	if before.BGP == nil || reflect.DeepEqual(before.BGP.Peers, after.BGP.Peers) {
		return
	}
	s.log.Info("peers selected by the labels of this node", "peers", len(after.BGP.Peers))
	if err := s.apply(after); err != nil {
		s.log.Error("peers not changed", "err", err)
	}
}
