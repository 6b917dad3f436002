package admin

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/httplimit"
)

const (
	// connections is the maximum number of concurrent clients of the socket, and of the TCP port.
	connections = 256
	// listenRetry is the time between two attempts to listen.
	listenRetry = 5 * time.Second
	// watchInterval is the time between checks that the socket's path still leads to the listener.
	watchInterval = time.Second
)

// Run listens and serves until ctx ends. A socket that cannot be opened is reported as a problem and retried; the other
// one is not affected.
func (s *Server) Run(ctx context.Context) error {
	var serving sync.WaitGroup
	serving.Go(func() {
		s.serve(ctx, "admin API on "+s.o.Socket, s.Handler(true), func() (net.Listener, error) {
			return listenUnix(s.o.Socket)
		})
	})
	if s.o.Listen != "" {
		part := "admin API on " + s.o.Listen
		wrap := func(l net.Listener) net.Listener { return l }
		if s.o.TLSCert != "" {
			c := &certificate{cert: s.o.TLSCert, key: s.o.TLSKey}
			_ = c.update() // follow reports the error
			problem := func(err error) { s.o.Problem("TLS of the "+part, err) }
			serving.Go(func() { c.follow(ctx, s.watchInterval, problem) })
			wrap = func(l net.Listener) net.Listener { return tls.NewListener(l, &tls.Config{GetCertificate: c.get}) }
		}
		serving.Go(func() {
			s.serve(ctx, part, s.public(), func() (net.Listener, error) {
				l, err := net.Listen("tcp", s.o.Listen)
				if err != nil {
					return nil, err
				}
				return wrap(filtered{l, s}), nil
			})
		})
	}
	serving.Wait()
	return nil
}

// RunStatus is like Run, but serves only /v1/status, from Options.Info, on the socket.
func (s *Server) RunStatus(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		i := s.o.Info()
		i.Settled = true
		i.judge(lb.Status{Settled: true}, nil, s.now())
		write(w, http.StatusOK, i)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, errors.New("this is an allocator, which serves only its status"))
	})
	s.serve(ctx, "admin API on "+s.o.Socket, mux, func() (net.Listener, error) { return listenUnix(s.o.Socket) })
	return nil
}

// public returns the handler of the TCP port.
func (s *Server) public() http.Handler {
	return protected(s.checkHost(s.authorize(inTurn(s.Handler(false)))))
}

func (s *Server) serve(ctx context.Context, part string, h http.Handler, listen func() (net.Listener, error)) {
	limit := httplimit.New(connections)
	for {
		l, err := listen()
		s.o.Problem(part, err)
		if err == nil {
			server := limit.Server(httplimit.Bounded(s.o.Boundary, h), s.o.Log)
			server.ConnContext = withUser
			stop := context.AfterFunc(ctx, func() { server.Close() })
			lost := s.watch(ctx, l, server)
			err = server.Serve(l)
			stop()
			if lost := lost(); lost != nil && ctx.Err() == nil {
				s.o.Problem(part, lost)
				continue
			}
			if ctx.Err() == nil {
				s.o.Problem(part, err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(s.retry):
		}
	}
}

// watch shuts a server down when its unix socket has lost its path, because clients can no longer find it. Running
// requests are completed. The returned function stops the watch and says why the server was shut down, or returns nil
// if it was not.
func (s *Server) watch(ctx context.Context, l net.Listener, server *http.Server) (end func() error) {
	socket, ok := l.(*reserved)
	if !ok {
		return func() error { return nil }
	}
	ctx, cancel := context.WithCancel(ctx)
	var lost error
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		tick := time.NewTicker(s.watchInterval)
		defer tick.Stop()
		for lost == nil {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				lost = socket.lost()
			}
		}
		go shutdown(server)
	}()
	return func() error {
		cancel()
		<-watching
		return lost
	}
}

// shutdown stops a server once its running requests are answered, or after clientTimeout.
func shutdown(server *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), clientTimeout)
	defer cancel()
	if server.Shutdown(ctx) != nil {
		server.Close()
	}
}

// checkHost refuses requests for a host that is neither an address nor a name of this node. Otherwise a page from
// another site, whose name resolves to this node at its second look-up (DNS rebinding), could read the API through a
// browser in the node's network.
func (s *Server) checkHost(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.known(r.Host) {
			h.ServeHTTP(w, r)
			return
		}
		writeError(w, http.StatusMisdirectedRequest, fmt.Errorf(
			"%q is not a name of this node; use its address, or add the name to [admin] hosts", r.Host))
	})
}

// known reports whether the Host of a request is an address, "localhost", or one of Hosts.
func (s *Server) known(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	_, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil || host == "" || host == "localhost" || slices.ContainsFunc(s.o.Hosts, func(own string) bool {
		return strings.EqualFold(own, host)
	})
}

// listenUnix replaces the socket of a stopped agent, but not the socket of a running one.
func listenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("create the directory of the API socket: %w", err)
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("listen on %s: another agent is running there; stop it first", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove the API socket of a previous run: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen for the API: %w", err)
	}
	if err := os.Chmod(path, 0o660); err != nil {
		l.Close()
		return nil, fmt.Errorf("set the mode of the API socket: %w", err)
	}
	made, err := os.Lstat(path)
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("find the API socket: %w", err)
	}
	return newReserved(l, made), nil
}
