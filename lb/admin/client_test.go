package admin

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// serveAnswer answers every request on a new socket with a status and a body, and returns a client of it.
func serveAnswer(t *testing.T, code int, body string) *Client {
	t.Helper()
	socket := options(t).Socket
	l := must.Get(net.Listen("unix", socket))(t)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		w.Write([]byte(body))
	})}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	return NewClient(socket)
}

func TestClientErrors(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		code       int
		err        string // or ""
	}{
		{"answer", `"x"`, 200, ""},
		{"not JSON", `x`, 200, "read the response to /v1/x: invalid character"},
		{"wrong type", `1`, 200, "read the response to /v1/x: json: cannot unmarshal number"},
		{"refused", `{"error":"no\nno"}`, 422, "no\nno"},
		{"refused, not JSON", `404 page not found`, 404, "the agent responded 404 Not Found to /v1/x"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := serveAnswer(t, tt.code, tt.body)
			for _, do := range []func(v any) error{
				func(v any) error { return c.Get(t.Context(), "/v1/x", v) },
				func(v any) error { return c.Post(t.Context(), "/v1/x", v) },
			} {
				var v string
				err := do(&v)
				if tt.err == "" {
					must.True(t, err == nil && v == "x", "%q, %v", v, err)
					continue
				}
				must.True(t, err != nil && strings.HasPrefix(err.Error(), tt.err), "error %v; want %s", err, tt.err)
				var refused *RefusedError
				if errors.As(err, &refused) != (tt.code != 200) || refused != nil && refused.Code != tt.code {
					t.Errorf("RefusedError %+v", refused)
				}
			}
		})
	}
	c := NewClient(strings.Repeat("x", 200))
	err := c.Get(t.Context(), "/v1/x", nil)
	must.True(t, err != nil && strings.HasPrefix(err.Error(), "request to the agent on x"),
		"a path too long for a socket: %v", err)
	err = c.Get(t.Context(), "/%", nil)
	must.True(t, err != nil && strings.HasPrefix(err.Error(), "request /%: "), "a wrong path: %v", err)
}

// A socket file without a listener is one that an agent left behind.
func TestClientOfAnAgentThatHasEnded(t *testing.T) {
	socket := options(t).Socket
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"}))(t)
	l.SetUnlinkOnClose(false)
	l.Close()
	err := NewClient(socket).Get(t.Context(), "/v1/x", nil)
	must.True(t, err != nil && strings.HasPrefix(err.Error(), "no agent listens on "+socket), "error %v", err)
}

// A request to an agent that does not accept connections times out.
func TestClientTimeout(t *testing.T) {
	socket := options(t).Socket
	l := must.Get(net.Listen("unix", socket))(t)
	defer l.Close()
	c := NewClient(socket)
	quick, slow := c.timeout("/v1/drain?node=true"), c.timeout("/v1/reload")
	must.True(t, quick <= 5*time.Second && slow >= 30*time.Second, "timeouts %v and %v", quick, slow)
	for path, bound := range map[string]*time.Duration{"/v1/status": &c.quick, "/v1/flows?limit=0": &c.slow} {
		c.quick, c.slow = time.Hour, time.Hour
		*bound = 50 * time.Millisecond
		var v any
		err := c.Get(t.Context(), path, &v)
		must.True(t, err != nil && strings.Contains(err.Error(), "does not respond within 50ms"),
			"%s: error %v", path, err)
	}
}

// bodies answers each request with a body that records its Close.
type bodies struct {
	code, closed int
	io.Reader
}

func (b *bodies) RoundTrip(*http.Request) (*http.Response, error) {
	b.Reader = strings.NewReader(`"x"`)
	return &http.Response{StatusCode: b.code, Body: b}, nil
}

func (b *bodies) Close() error { b.closed++; return nil }

// The client closes the body of each response, so that no connection stays open.
func TestClientClosesBody(t *testing.T) {
	for _, code := range []int{http.StatusOK, http.StatusNotFound} {
		b := &bodies{code: code}
		c := NewClient("s")
		c.http.Transport = b
		var v string
		err := c.Get(t.Context(), "/v1/x", &v)
		must.True(t, (err == nil) == (code == http.StatusOK) && b.closed == 1,
			"status %d: %v, closed %d times", code, err, b.closed)
	}
}

// Follow ends without an error if its context ends, even within an event. If the agent ends the response, it says so.
func TestFollow(t *testing.T) {
	const cutOff = "the agent has stopped, or nobody has read its output for a minute"
	for name, tt := range map[string]struct {
		cut  string // what the agent sends after its first event
		stop bool   // the context ends then; otherwise the agent cuts the connection
		err  string
	}{
		"interrupted":                    {"", true, ""},
		"interrupted in an event":        {"data: {\"x\":", true, ""},
		"cut off":                        {"", false, cutOff},
		"cut off within an event":        {"data: {\"x\":", false, cutOff},
		"ends as a whole":                {"end", false, "the agent has stopped"},
		"interrupted without a response": {"none", true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			socket := options(t).Socket
			server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if tt.cut != "none" {
					io.WriteString(w, "data: 1\n\n")
				}
				if tt.cut == "end" {
					return
				}
				if tt.cut != "none" {
					io.WriteString(w, tt.cut)
					http.NewResponseController(w).Flush()
					time.Sleep(50 * time.Millisecond) // until the client has read it
				}
				if tt.stop {
					cancel()
					<-r.Context().Done()
				}
				panic(http.ErrAbortHandler)
			})}
			go server.Serve(must.Get(net.Listen("unix", socket))(t))
			defer server.Close()
			var got []string
			err := NewClient(socket).Follow(ctx, "/v1/x", func(data []byte) error {
				got = append(got, strings.TrimSpace(string(data)))
				return nil
			})
			must.True(t, tt.err == "" && err == nil || err != nil && err.Error() == tt.err, "error %v", err)
			must.True(t, tt.cut == "none" && got == nil || slices.Equal(got, []string{"1"}), "events %q", got)
		})
	}
}
