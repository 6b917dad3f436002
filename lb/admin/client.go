package admin

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Client sends requests to an agent over its unix socket.
type Client struct {
	socket string
	http   http.Client
	// quick bounds requests that a working agent answers immediately; slow bounds all others.
	quick, slow time.Duration
}

// The timeouts end requests to a stuck agent. clientTimeout is longer than a working agent takes to reload 10,000
// services or to list a million flows. A response to quickPaths waits at most for the engine.
const (
	clientTimeout = time.Minute
	quickTimeout  = 2*engineTimeout + time.Second
)

var quickPaths = []string{"/v1/status", "/v1/peers", "/v1/drain", "/v1/undrain", "/v1/weight", "/healthz"}

// timeout returns the time limit of a request.
func (c *Client) timeout(path string) time.Duration {
	if path, _, _ := strings.Cut(path, "?"); slices.Contains(quickPaths, path) {
		return c.quick
	}
	return c.slow
}

// NewClient returns a Client for the agent that listens on socket.
func NewClient(socket string) *Client {
	c := &Client{socket: socket, quick: quickTimeout, slow: clientTimeout}
	c.http.Transport = &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
	}
	return c
}

// ErrPermission means that the user may not connect to the socket. An agent may be listening on it.
var ErrPermission = errors.New("no permission")

// ErrNoAgent means that nothing listens on the socket.
var ErrNoAgent = errors.New("no agent")

// RefusedError is a response with a status other than 200.
type RefusedError struct {
	Code    int    // HTTP status
	Path    string // of the request
	Problem string // from the agent, one line for each reason
}

func (e *RefusedError) Error() string {
	if e.Problem == "" {
		return fmt.Sprintf("the agent responded %d %s to %s", e.Code, http.StatusText(e.Code), e.Path)
	}
	return e.Problem
}

// Get decodes the response to a GET of path into v. Its error is a RefusedError, or has a hint if no agent runs.
func (c *Client) Get(ctx context.Context, path string, v any) error {
	return c.do(ctx, http.MethodGet, path, nil, v)
}

// Post is like Get, with the method POST.
func (c *Client) Post(ctx context.Context, path string, v any) error {
	return c.Send(ctx, path, nil, v)
}

// Send is like Post, with a body.
func (c *Client) Send(ctx context.Context, path string, body []byte, v any) error {
	return c.do(ctx, http.MethodPost, path, body, v)
}

// Follow calls each with the data of each server-sent event in the response to a GET of path. It returns nil if ctx
// ends, and an error if each fails or the agent ends the response. It leaves out an event whose end has not arrived.
func (c *Client) Follow(ctx context.Context, path string, each func(data []byte) error) error {
	body, err := c.open(ctx, http.MethodGet, path, nil)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer body.Close()
	for lines := bufio.NewReader(body); ; {
		line, err := lines.ReadBytes('\n')
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, io.EOF):
			return errors.New("the agent has stopped")
		case errors.Is(err, io.ErrUnexpectedEOF):
			return errors.New("the agent has stopped, or nobody has read its output for a minute")
		default:
			return err
		}
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			if err := each(data); err != nil {
				return err
			}
		}
	}
}

func (c *Client) do(ctx context.Context, method, path string, body []byte, v any) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout(path))
	defer cancel()
	answer, err := c.open(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer answer.Close()
	if err := json.NewDecoder(answer).Decode(v); err != nil {
		return fmt.Errorf("read the response to %s: %w", path, err)
	}
	return nil
}

// open sends a request and returns the body of the response.
func (c *Client) open(ctx context.Context, method, path string, body []byte) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://steelyard"+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", path, err)
	}
	resp, err := c.http.Do(req)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%w listens on %s; is \"steelyard run\" running, and is this its admin.socket?",
			ErrNoAgent, c.socket)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w for %s; use sudo", ErrPermission, c.socket)
	case errors.Is(err, context.DeadlineExceeded):
		return nil, fmt.Errorf("the agent on %s does not respond within %v; its log may say why", c.socket,
			c.timeout(path))
	case err != nil:
		if request := new(url.Error); errors.As(err, &request) {
			err = request.Err // without the address that only stands for the socket
		}
		return nil, fmt.Errorf("request to the agent on %s: %w", c.socket, err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		var e struct{ Error string }
		json.NewDecoder(resp.Body).Decode(&e)
		return nil, &RefusedError{resp.StatusCode, path, e.Error}
	}
	return resp.Body, nil
}
