package admin

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// Reloaded describes the active configuration after a reload, in the response of /v1/reload. In the response of
// /v1/diff it describes what a reload would activate.
type Reloaded struct {
	Config      string      `json:"config"`
	Loaded      time.Time   `json:"loaded,omitzero"` // zero if it is not active
	Changes     []lb.Change `json:"changes"`
	Warnings    []string    `json:"warnings,omitempty"`
	NeedRestart []string    `json:"need_restart,omitempty"` // changed sections that are read only at startup
}

// Text is the response of /v1/config.
type Text struct {
	Text string `json:"text"` // of the active configuration file
}

// reload responds with 422 if the configuration is rejected: the request is valid, but the file is not.
func (s *Server) reload(w http.ResponseWriter, r *http.Request) {
	writeReloaded(w)(s.o.Reload(r.URL.Query().Get("force")))
}

// configMax bounds the text of a configuration. A configuration with 10,000 services takes a tenth of that.
const configMax = 64 << 20

// diff responds like reload, but changes nothing. With POST, the body replaces the file; ?name= is its name.
func (s *Server) diff(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		writeReloaded(w)(s.o.Diff("", nil))
		return
	}
	name := r.URL.Query().Get("name")
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, configMax))
	if err == nil && name == "" {
		err = errors.New("want name=FILE")
	}
	if err != nil {
		writeError(w, http.StatusBadRequest, err)
		return
	}
	writeReloaded(w)(s.o.Diff(name, text))
}

// proxyDiff responds with 422 if there is nothing to compare with.
func (s *Server) proxyDiff(w http.ResponseWriter, _ *http.Request) {
	if s.o.ProxyDiff == nil {
		writeError(w, http.StatusUnprocessableEntity, errors.New("the configuration has no section [kubernetes]"))
		return
	}
	changes, err := s.o.ProxyDiff()
	if err != nil {
		writeError(w, http.StatusUnprocessableEntity, err)
		return
	}
	write(w, http.StatusOK, listOf(changes))
}

func writeReloaded(w http.ResponseWriter) func(Reloaded, error) {
	return func(now Reloaded, err error) {
		if err != nil {
			writeError(w, http.StatusUnprocessableEntity, err)
			return
		}
		now.Changes = listOf(now.Changes)
		write(w, http.StatusOK, now)
	}
}
