package healthd

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// maxHeader and maxBody limit how many bytes of a response are read.
const maxHeader, maxBody = 64 << 10, 64 << 10

// httpChecker requests a path. The first port of a service must use the configured scheme. On other ports it also tries
// the other scheme; if a port uses neither, it need only accept the connection and respond or close it.
type httpChecker struct {
	target
	scheme    string
	protocols http.Protocols
	tls       *tls.Config
}

func newHTTPChecker(t target) Checker {
	c := httpChecker{target: t, scheme: "http", tls: tlsConfig(t.Spec)}
	c.protocols.SetHTTP1(t.Spec.Type != lb.CheckHTTP2)
	c.protocols.SetHTTP2(true) // offered in the TLS handshake
	c.protocols.SetUnencryptedHTTP2(t.Spec.Type == lb.CheckHTTP2)
	if t.Spec.Type == lb.CheckHTTPS {
		c.scheme = "https"
	}
	return c
}

func (c httpChecker) Probe(ctx context.Context) (Result, error) {
	if c.ByRoot {
		if err := byRoot(c.Target); err != nil {
			return Result{}, err
		}
	}
	resp, body, err := c.get(ctx, c.scheme)
	if c.secondary() && c.isOtherProtocol(resp, err) {
		scheme := map[string]string{"http": "https", "https": "http"}[c.scheme]
		resp, body, err = c.get(ctx, scheme)
		if c.isOtherProtocol(resp, err) {
			return ok("connected, not HTTP")
		}
	}
	if err != nil {
		return Result{}, err
	}
	if !c.wants(resp) {
		return fail("HTTP %d, want %s", resp.StatusCode, ranges(c.Spec.Status))
	}
	if !strings.Contains(body, c.Spec.Body) {
		return fail("HTTP %d, body does not contain %q", resp.StatusCode, c.Spec.Body)
	}
	return ok(fmt.Sprintf("HTTP %d", resp.StatusCode))
}

func (c httpChecker) wants(resp *http.Response) bool {
	return slices.ContainsFunc(c.Spec.Status, func(r lb.StatusRange) bool { return r.Contains(resp.StatusCode) })
}

// isOtherProtocol reports whether the server accepted the connection but responded in another protocol. HTTPS servers
// respond to HTTP with status 400.
func (c httpChecker) isOtherProtocol(resp *http.Response, err error) bool {
	if err == nil {
		return resp.StatusCode == http.StatusBadRequest && !c.wants(resp)
	}
	var op *net.OpError
	var certificate *tls.CertificateVerificationError
	isDial := errors.As(err, &op) && op.Op == "dial"
	return !isDial && !isTimeout(err) && !errors.As(err, &certificate)
}

// get makes one request over a new connection and does not follow redirects. It reads the response body only if the
// check needs it.
func (c httpChecker) get(ctx context.Context, scheme string) (*http.Response, string, error) {
	u, err := url.Parse(c.Spec.Path)
	if err != nil {
		return nil, "", fmt.Errorf("path %q: %w", c.Spec.Path, err)
	}
	d, to, err := c.dialer("tcp")
	if err != nil {
		return nil, "", err
	}
	u.Scheme, u.Host = scheme, to.String()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, "", err
	}
	req.Host = c.Spec.Host
	req.Header.Set("User-Agent", "steelyard-health")
	transport := &http.Transport{
		DisableKeepAlives: true, Proxy: nil, DialContext: d.DialContext, TLSClientConfig: c.tls.Clone(),
		Protocols: &c.protocols, MaxResponseHeaderBytes: maxHeader,
	}
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	// After status 101 the body is the connection itself, and ctx would not interrupt reads.
	if c.Spec.Body == "" || resp.StatusCode == http.StatusSwitchingProtocols {
		return resp, "", nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return nil, "", err
	}
	return resp, string(body), nil
}

func ranges(rs []lb.StatusRange) string {
	var out []string
	for _, r := range rs {
		s := strconv.Itoa(r.From)
		if r.To != r.From {
			s += "-" + strconv.Itoa(r.To)
		}
		out = append(out, s)
	}
	return strings.Join(out, ",")
}

// nodePortChecker requests a Kubernetes node's healthCheckNodePort, or its proxy's /healthz, as an external load
// balancer does: only the HTTP status counts, because the port is open on every node. If Body is set, to
// "namespace/name", the response must be about that Service. The request goes to the node's own address, not to the
// VIP.
//
// A node that responds with 503 accepts no new flows but keeps existing ones: its pods are terminating, or it is about
// to be removed.
type nodePortChecker struct{ httpChecker }

func (c nodePortChecker) Probe(ctx context.Context) (Result, error) {
	c.VIP = netip.Addr{}
	resp, body, err := c.get(ctx, "http")
	if err != nil {
		return Result{}, err
	}
	if got := serviceOf(body); c.Spec.Body != "" && got != c.Spec.Body {
		return fail("HTTP %d, the response is about a different service: %.100q", resp.StatusCode, got)
	}
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusServiceUnavailable:
		return Result{}, drainingError{errors.New("HTTP 503: the node has no endpoint, or its proxy is not healthy")}
	default:
		return fail("HTTP %d: not a health check node port", resp.StatusCode)
	}
	r := Result{Reason: "HTTP 200", Weight: -1}
	if h := resp.Header.Get("X-Load-Balancing-Endpoint-Weight"); h != "" {
		n, err := strconv.Atoi(h)
		if err != nil || n < 0 || n > lb.MaxWeight {
			return fail("X-Load-Balancing-Endpoint-Weight is %q, want a number from 0 to %d", h, lb.MaxWeight)
		}
		r.Weight, r.Reason = n, fmt.Sprintf("HTTP 200, %d endpoints", n)
	}
	return r, nil
}

// serviceOf returns the "namespace/name" of the Service that a response is about, or the body if it names none
// (kubernetes pkg/proxy/healthcheck/service_health.go).
func serviceOf(body string) string {
	var resp struct {
		Service struct{ Namespace, Name string }
	}
	if json.Unmarshal([]byte(body), &resp) != nil {
		return body
	}
	return resp.Service.Namespace + "/" + resp.Service.Name
}
