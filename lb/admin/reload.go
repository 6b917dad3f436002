package admin

import (
	"errors"
	"fmt"
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
	// ConfirmUntil is when the previous configuration becomes active again unless this one is confirmed. It is zero if
	// this one is confirmed.
	ConfirmUntil time.Time `json:"confirm_until,omitzero"`
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
	if name, text, ok := posted(w, r); ok {
		writeReloaded(w)(s.o.Diff(name, text))
	}
}

// posted returns a configuration in the body, and its name in ?name=. It writes the error if there is one.
func posted(w http.ResponseWriter, r *http.Request) (name string, text []byte, ok bool) {
	name = r.URL.Query().Get("name")
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, configMax))
	if err == nil && name == "" {
		err = errors.New("want name=FILE")
	}
	if err != nil {
		writeError(w, http.StatusBadRequest, err)
	}
	return name, text, err == nil
}

// ConfirmMax bounds the time to confirm a configuration.
const ConfirmMax = time.Hour

// ParseConfirm parses the time to confirm a configuration.
func ParseConfirm(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second || d > ConfirmMax {
		return 0, fmt.Errorf("confirm %q: want a time from 1s to 1h, such as 60s", text)
	}
	return d, nil
}

// apply responds like reload, for the configuration in the body. ?confirm= is the time to confirm it.
func (s *Server) apply(w http.ResponseWriter, r *http.Request) {
	var within time.Duration
	if q := r.URL.Query(); q.Has("confirm") {
		var err error
		if within, err = ParseConfirm(q.Get("confirm")); err != nil {
			writeError(w, http.StatusBadRequest, err)
			return
		}
	}
	if name, text, ok := posted(w, r); ok {
		writeReloaded(w)(s.o.Apply(name, text, r.URL.Query().Get("force"), within))
	}
}

// confirm responds with 422 if no configuration waits to be confirmed, or the file cannot be written.
func (s *Server) confirm(w http.ResponseWriter, _ *http.Request) { writeReloaded(w)(s.o.Confirm()) }

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

// restart responds before the agent ends, or with 422 if the configuration is rejected.
func (s *Server) restart(w http.ResponseWriter, _ *http.Request) {
	if err := s.o.Restart(); err != nil {
		writeError(w, http.StatusUnprocessableEntity, err)
		return
	}
	write(w, http.StatusOK, struct{}{})
}
