package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb/events"
)

// eventsIdle is the time after which the server sends an empty comment to a reader that follows the events, to notice
// if it has gone.
const eventsIdle = 30 * time.Second

// events lists the history. With ?follow=true, if allowed, it continues with new events as server-sent events.
func (s *Server) events(mayFollow bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		f := events.Filter{Kind: q.Get("kind"), Service: q.Get("service")}
		if since := q.Get("since"); since != "" {
			ago, err := time.ParseDuration(since)
			if err != nil {
				writeError(w, http.StatusBadRequest, fmt.Errorf("since=%s: want a duration, such as 10m", since))
				return
			}
			f.Since = time.Now().Add(-ago)
		}
		list, n, changed := s.o.Events(0, f)
		if q.Get("follow") != "true" {
			write(w, http.StatusOK, list)
			return
		}
		if !mayFollow {
			writeError(w, http.StatusForbidden, errors.New("follow works only on the unix socket"))
			return
		}
		s.follow(w, r.Context(), f, list, n, changed)
	}
}

// follow writes a list of events, the first n of all, and then each new one, until the reader has gone.
func (s *Server) follow(
	w http.ResponseWriter, ctx context.Context, f events.Filter, list []events.Event, n int, changed <-chan struct{},
) {
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	for {
		deadline := time.Now().Add(2 * eventsIdle)
		text := ":\n\n"
		for _, e := range list {
			line, _ := json.Marshal(e) // of strings and a time: never fails
			text += "data: " + string(line) + "\n\n"
		}
		_, err := w.Write([]byte(text))
		if err := cmp.Or(err, out.SetWriteDeadline(deadline), out.Flush()); err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(eventsIdle):
			list = nil
			continue
		case <-changed:
		}
		list, n, changed = s.o.Events(n, f)
	}
}

// asUser logs a request that changes something, with the user who has sent it.
func (s *Server) asUser(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		attrs := []any{"user", r.Context().Value(userKey{})}
		q := r.URL.Query()
		for _, name := range slices.Sorted(maps.Keys(q)) {
			attrs = append(attrs, name, strings.Join(q[name], " "))
		}
		s.o.Log.Info("asked to "+strings.TrimPrefix(r.URL.Path, "/v1/"), attrs...)
		h(w, r)
	}
}

// asOwner serves only root and the agent's own user. Who may open the socket may act on services, but a configuration
// can also run programs.
func asOwner(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if uid, ok := r.Context().Value(uidKey{}).(int); ok && uid != 0 && uid != os.Geteuid() {
			writeError(w, http.StatusForbidden, errors.New("only root may put another configuration in force"))
			return
		}
		h(w, r)
	}
}

// uidKey is the context key of the id of that user, or -1. It is set for each connection of the socket.
type uidKey struct{}

// userKey is the context key of the name of the user who opened the connection.
type userKey struct{}

// withUser adds the user at the other end of a unix socket (SO_PEERCRED, unix(7)) to the context of its requests.
func withUser(ctx context.Context, c net.Conn) context.Context {
	if r, ok := c.(*reservedConn); ok {
		c = r.Conn
	}
	name, uid := "unknown", -1
	if u, ok := c.(*net.UnixConn); ok {
		if raw, err := u.SyscallConn(); err == nil {
			raw.Control(func(fd uintptr) {
				if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
					uid = int(cred.Uid)
					name = "uid " + strconv.Itoa(int(cred.Uid))
					if who, err := user.LookupId(strconv.Itoa(int(cred.Uid))); err == nil {
						name = who.Username
					}
				}
			})
		}
	}
	return context.WithValue(context.WithValue(ctx, userKey{}, name), uidKey{}, uid)
}
