package traffic

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

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Client sends requests from a host. Its methods may be called from any goroutine.
type Client struct{ *lab.Host }

// From returns a Client that sends from h.
func From(h *lab.Host) Client { return Client{h} }

// Answer is the response to one request.
type Answer struct {
	Server string         // the server's name
	Client netip.AddrPort // the client as the server sees it
	Status int
	Body   string
}

// Load is a number of HTTP requests, each over its own connection.
type Load struct {
	URL      string
	Requests int
	// Parallel is the maximum number of requests in flight; 0 means 8.
	Parallel int
	// Timeout limits each request; 0 means 2 s.
	Timeout time.Duration
}

type Result struct {
	// Servers has the number of requests answered by each server.
	Servers map[string]int
	// Errors has one error per request that was not answered with status 200.
	Errors []error
}

func (r Result) Answered() int {
	n := 0
	for _, c := range r.Servers {
		n += c
	}
	return n
}

// Err returns nil if every request was answered. Otherwise its error has the number of failed requests and the first
// error.
func (r Result) Err() error {
	if len(r.Errors) == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d requests failed; the first: %w", len(r.Errors), len(r.Errors)+r.Answered(), r.Errors[0])
}

// String returns a phrase such as "s1 334, s2 333, s3 333, errors 0".
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

// Get requests url over a new connection.
func (c Client) Get(ctx context.Context, url string) (Answer, error) {
	client := c.httpClient()
	defer client.CloseIdleConnections()
	return get(ctx, client, url)
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

// dialTimeout exceeds every request's timeout. It ends the threads of abandoned connection attempts.
const dialTimeout = 5 * time.Second

// httpClient returns a client that sends each request from the host over a new connection.
func (c Client) httpClient() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTimeout) // ctx does not end with the request
			defer cancel()
			return c.Dial(ctx, network, addr)
		},
	}}
}

// Load sends the requests, and returns once all have been answered or have failed.
func (c Client) Load(ctx context.Context, l Load) Result {
	if l.Parallel == 0 {
		l.Parallel = 8
	}
	if l.Timeout == 0 {
		l.Timeout = 2 * time.Second
	}
	client := c.httpClient()
	defer client.CloseIdleConnections()
	var (
		queue = make(chan struct{}, l.Requests)
		mu    sync.Mutex // guards r
		r     Result
		wg    sync.WaitGroup
	)
	for range l.Requests {
		queue <- struct{}{}
	}
	close(queue)
	for range min(l.Parallel, l.Requests) {
		wg.Go(func() {
			for range queue {
				ctx, cancel := context.WithTimeout(ctx, l.Timeout)
				a, err := get(ctx, client, l.URL)
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
func (c Client) Upload(ctx context.Context, url string, size int64) (Answer, error) {
	client := c.httpClient()
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, io.LimitReader(zeros{}, size))
	if err != nil {
		return Answer{}, err
	}
	req.ContentLength = size
	return do(client, req)
}

// UDP sends n datagrams of at least size bytes to a UDPEcho, each from its own port, and waits at most timeout for each
// response.
func (c Client) UDP(ctx context.Context, to netip.AddrPort, n, size int, timeout time.Duration) Result {
	var r Result
	for i := range n {
		name, err := c.udp(ctx, to, fmt.Sprintf("%d%0*d", i, size, i), timeout)
		r.add(Answer{Server: name, Status: http.StatusOK}, err)
	}
	return r
}

func (c Client) udp(ctx context.Context, to netip.AddrPort, text string, timeout time.Duration) (string, error) {
	conn, err := c.Dial(ctx, "udp", to.String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, text); err != nil {
		return "", err
	}
	b := make([]byte, 64<<10)
	k, err := conn.Read(b)
	if err != nil {
		return "", err
	}
	server, echo, _ := strings.Cut(string(b[:k]), " ")
	if echo != text {
		return "", fmt.Errorf("the response is to a different datagram: %.100s", b[:k])
	}
	return server, nil
}
