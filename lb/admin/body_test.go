package admin

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// bodies answers each request with a body that records its Close.
type bodies struct {
	code   int
	closed int
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
		if err := c.Get(t.Context(), "/v1/x", &v); (err == nil) != (code == http.StatusOK) || b.closed != 1 {
			t.Errorf("status %d: %v, closed %d times; want once", code, err, b.closed)
		}
	}
}

// The client keeps no connection, for a command sends one request.
func TestClientKeepsNoConnection(t *testing.T) {
	if transport := NewClient("s").http.Transport.(*http.Transport); !transport.DisableKeepAlives {
		t.Error("connections are kept")
	}
}
