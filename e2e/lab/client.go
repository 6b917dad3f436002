package lab

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// Answer is what a client got.
type Answer struct {
	Server string         // the name of the server that answered
	Client netip.AddrPort // whom the server saw
	Status int
	Body   string
}

// Load is a number of HTTP requests, each over a connection of its own.
type Load struct {
	URL      string
	Requests int
	// Parallel is how many are under way at the same time; 0 means 8.
	Parallel int
	// Timeout bounds each of them; 0 means 2 s.
	Timeout time.Duration
}

// Result says how a number of requests ended.
type Result struct {
	// Servers is how many requests each server answered.
	Servers map[string]int
	// Errors has one error for each request that was not answered with status 200.
	Errors []error
}

// Answered is the number of requests that were answered.
func (r Result) Answered() int {
	n := 0
	for _, c := range r.Servers {
		n += c
	}
	return n
}

// Err is nil when every request was answered; else it says how many were not, and why the first was not.
func (r Result) Err() error {
	if len(r.Errors) == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d requests failed, the first: %w", len(r.Errors), len(r.Errors)+r.Answered(), r.Errors[0])
}

// String is "s1 334, s2 333, s3 333, errors 0".
func (r Result) String() string {
	var parts []string
	for _, s := range slices.Sorted(maps.Keys(r.Servers)) {
		parts = append(parts, fmt.Sprintf("%s %d", s, r.Servers[s]))
	}
	return strings.Join(append(parts, fmt.Sprintf("errors %d", len(r.Errors))), ", ")
}

func (r *Result) add(a Answer, err error) {
	if r.Servers == nil {
		r.Servers = map[string]int{}
	}
	if err == nil && a.Status != http.StatusOK {
		err = fmt.Errorf("%s answered with status %d", a.Server, a.Status)
	}
	if err != nil {
		r.Errors = append(r.Errors, err)
		return
	}
	r.Servers[a.Server]++
}

// Get asks for url over a new connection.
func (h *Host) Get(ctx context.Context, url string) (Answer, error) {
	c := h.httpClient()
	defer c.CloseIdleConnections()
	return get(ctx, c, url)
}

func get(ctx context.Context, c *http.Client, url string) (Answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return Answer{}, err
	}
	return do(c, req)
}

func do(c *http.Client, req *http.Request) (Answer, error) {
	resp, err := c.Do(req)
	if err != nil {
		return Answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	a := Answer{Server: resp.Header.Get(serverHeader), Status: resp.StatusCode, Body: string(body)}
	if from, e := netip.ParseAddrPort(resp.Header.Get(clientHeader)); e == nil {
		a.Client = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
	}
	return a, err
}

// httpClient asks from inside the host, each request over a new connection.
func (h *Host) httpClient() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return h.Dial(ctx, network, addr)
		},
	}}
}

// Load makes the requests and returns when each has been answered or has failed.
func (h *Host) Load(ctx context.Context, l Load) Result {
	if l.Parallel == 0 {
		l.Parallel = 8
	}
	if l.Timeout == 0 {
		l.Timeout = 2 * time.Second
	}
	c := h.httpClient()
	defer c.CloseIdleConnections()
	var (
		mu    sync.Mutex // guards r
		r     Result
		wg    sync.WaitGroup
		turns = make(chan struct{}, l.Requests)
	)
	for range l.Requests {
		turns <- struct{}{}
	}
	close(turns)
	for range min(l.Parallel, l.Requests) {
		wg.Go(func() {
			for range turns {
				ctx, cancel := context.WithTimeout(ctx, l.Timeout)
				a, err := get(ctx, c, l.URL)
				cancel()
				mu.Lock()
				r.add(a, err)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return r
}

// Upload sends size bytes to url over a new connection.
func (h *Host) Upload(ctx context.Context, url string, size int64) (Answer, error) {
	c := h.httpClient()
	defer c.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, io.LimitReader(zeros{}, size))
	if err != nil {
		return Answer{}, err
	}
	req.ContentLength = size
	return do(c, req)
}

// UDP sends n datagrams of at least size bytes to a UDPEcho, each from a port of its own, and waits for each answer no longer
// than timeout.
func (h *Host) UDP(ctx context.Context, to netip.AddrPort, n, size int, timeout time.Duration) Result {
	var r Result
	for i := range n {
		name, err := h.udp(ctx, to, fmt.Sprintf("%d%0*d", i, size, i), timeout)
		r.add(Answer{Server: name, Status: http.StatusOK}, err)
	}
	return r
}

func (h *Host) udp(ctx context.Context, to netip.AddrPort, text string, timeout time.Duration) (server string, err error) {
	c, err := h.Dial(ctx, "udp", to.String())
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, text); err != nil {
		return "", err
	}
	b := make([]byte, 64<<10)
	k, err := c.Read(b)
	if err != nil {
		return "", err
	}
	server, echo, _ := strings.Cut(string(b[:k]), " ")
	if echo != text {
		return "", fmt.Errorf("the answer is to another datagram: %.100s", b[:k])
	}
	return server, nil
}
