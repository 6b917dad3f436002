package agent

import (
	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// assignedStore stores the pool addresses of services in the file.
type assignedStore struct {
	file *state.File
	kept *keeper
}

// openFileSource returns the source of the file's services, and the task that stores their addresses. The services keep
// the addresses of the previous run.
func openFileSource(o Options) (*file.Source, task) {
	kept := newKeeper("addresses not stored; services may get others from their pools at the next start", o.problems)
	s := assignedStore{state.New(o.KeepDir, "addresses", 1), kept}
	var had file.Assigned
	if _, err := s.file.Load(&had); err != nil {
		component(o.Log, "addresses").Warn(
			"addresses of the previous run not read; services may get others from their pools", "err", err)
		had = nil
	}
	return file.New(had, s), task{"addresses to store", kept.run}
}

// Save implements file.Store.
func (s assignedStore) Save(a file.Assigned) { s.kept.save(func() error { return s.file.Save(a) }) }
