package admin

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func request(path string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.Host = "192.0.2.1:9911"
	return r
}

// Over TCP one walk through the flows runs at a time, for 200 ms; the socket has neither limit.
func TestWalksOfReadersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := options(t)
		o.Flows = func(ctx context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			must.True(t, want.Limit <= flowLimit, "limit %d", want.Limit)
			<-ctx.Done()
			return make([]lb.FlowStatus, 2), true, nil
		}
		h := New(o).public()
		start := time.Now()
		first, second := httptest.NewRecorder(), httptest.NewRecorder()
		done := make(chan struct{})
		go func() { h.ServeHTTP(first, request("/v1/flows?limit=1000000")); close(done) }()
		synctest.Wait()
		h.ServeHTTP(second, request("/v1/flows"))
		must.True(t, second.Code == 503 && second.Header().Get("Retry-After") != "" && time.Since(start) == 0,
			"the second walk: %d, %v, after %s", second.Code, second.Header(), time.Since(start))
		<-done
		took := time.Since(start)
		must.True(t, first.Code == 200 && strings.Contains(first.Body.String(), `"more": true`) &&
			took == 200*time.Millisecond, "the first walk: %d %s after %s", first.Code, first.Body, took)
	})
}

// unreadable is a client that does not read its answer until it is released.
type unreadable struct {
	*httptest.ResponseRecorder
	release chan struct{}
}

func (w unreadable) Write(p []byte) (int, error) { <-w.release; return w.ResponseRecorder.Write(p) }

// At most four requests over TCP are processed concurrently; the others wait, but not for long. Clients that do not
// read their answers do not count, and their answers may take only some megabytes.
func TestReadersTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := options(t)
		var mu sync.Mutex
		working, most, size := 0, 0, 1
		o.Metrics = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			mu.Lock()
			working++
			most = max(most, working)
			mu.Unlock()
			time.Sleep(turnTimeout * 3 / 4)
			mu.Lock()
			working--
			mu.Unlock()
			w.WriteHeader(http.StatusTeapot)
			w.Write(make([]byte, size))
		})
		h := New(o).public()
		codes := map[int]int{}
		var all sync.WaitGroup
		for range 10 { // four work, four wait for 1.5 s, and two for too long
			all.Go(func() {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, request("/metrics"))
				mu.Lock()
				defer mu.Unlock()
				codes[w.Code]++
			})
		}
		all.Wait()
		must.True(t, most == handlers && codes[http.StatusTeapot] == 8 && codes[503] == 2,
			"%d at once, answers %v", most, codes)
		size = unreadMax / 2
		release := make(chan struct{})
		for range 2 {
			all.Go(func() { h.ServeHTTP(unreadable{httptest.NewRecorder(), release}, request("/metrics")) })
		}
		time.Sleep(turnTimeout)
		large, small := httptest.NewRecorder(), httptest.NewRecorder()
		h.ServeHTTP(large, request("/metrics"))
		h.ServeHTTP(small, request("/"))
		must.True(t, large.Code == 503 && small.Code == 200, "with unread answers: %d, %d", large.Code, small.Code)
		close(release)
		all.Wait()
	})
}

// fullEnv names the socket of the process in TestStatusWithoutDescriptors that has no descriptors left.
const fullEnv = "STEELYARD_TEST_FULL"

// An agent without descriptors answers on its socket, one client after the other.
func TestStatusWithoutDescriptors(t *testing.T) {
	if socket := os.Getenv(fullEnv); socket != "" {
		serveWithoutDescriptors(t, socket)
		return
	}
	socket := options(t).Socket
	cmd := exec.Command(os.Args[0], "-test.run=^TestStatusWithoutDescriptors$")
	cmd.Env, cmd.Stderr = append(os.Environ(), fullEnv+"="+socket), os.Stderr
	in := must.Get(cmd.StdinPipe())(t)
	out := must.Get(cmd.StdoutPipe())(t)
	must.Do(t, cmd.Start())
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	must.True(t, err == nil && line == "full\n", "%q, %v; want full", line, err)
	c := NewClient(socket)
	for n := range 3 {
		var i Info
		err := c.Get(t.Context(), "/v1/status", &i)
		must.True(t, err == nil && i.Verdict != "", "request %d: %v, %+v", n, err, i)
	}
	in.Close()
	rest, _ := io.ReadAll(lines)
	err = cmd.Wait()
	must.True(t, err == nil, "%v\n%s", err, rest)
}

// serveWithoutDescriptors takes all descriptors while the API is served, until stdin ends.
func serveWithoutDescriptors(t *testing.T, socket string) {
	o := options(t)
	o.Socket = socket
	open := make(chan bool, 2)
	o.Problem = func(_ string, err error) { open <- err == nil }
	server := New(o)
	go server.Run(t.Context())
	must.Need(t, <-open, "the socket is not open")
	var limit unix.Rlimit
	must.Do(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	limit.Cur = 64
	must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	var taken []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if errors.Is(err, syscall.EMFILE) {
			break
		}
		must.Do(t, err)
		taken = append(taken, f)
	}
	fmt.Println("full")
	must.Get(io.Copy(io.Discard, os.Stdin))(t)
	for _, f := range taken {
		f.Close()
	}
}
