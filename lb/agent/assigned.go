package agent

import (
	"log/slog"

	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// assignedStore keeps the addresses that services of the file have from pools.
type assignedStore struct {
	file *state.File
	log  *slog.Logger
}

// openFileSource returns the source of the services of the file. They keep the addresses of an earlier run.
func openFileSource(o Options) *file.Source {
	s := assignedStore{state.New(o.KeepDir, "addresses", 1), component(o.Log, "addresses")}
	var had file.Assigned
	if _, err := s.file.Load(&had); err != nil {
		s.log.Warn("addresses of an earlier run not read; services may get others from their pools", "err", err)
		had = nil
	}
	return file.New(had, s)
}

// Save implements file.Store.
func (s assignedStore) Save(a file.Assigned) {
	if err := s.file.Save(a); err != nil {
		s.log.Warn("addresses not stored; services may get others from their pools at the next start", "err", err)
	}
}
