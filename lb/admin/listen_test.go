package admin

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The TCP listener is read-only, the socket is not.
func TestListeners(t *testing.T) {
	free := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	o := options(t)
	o.Listen = free.Addr().String()
	o.Reload = func(string) (Reloaded, error) { return Reloaded{Config: "x"}, nil }

	var mu sync.Mutex
	problems := map[string]string{}
	problem := func() string {
		mu.Lock()
		defer mu.Unlock()
		return problems["admin API on "+o.Listen]
	}
	o.Problem = func(part string, err error) {
		mu.Lock()
		defer mu.Unlock()
		delete(problems, part)
		if err != nil {
			problems[part] = err.Error()
		}
	}
	server := New(o)
	server.retry = 5 * time.Millisecond
	must.Run(t, server.Run)
	// While the port is in use, the socket works.
	var info Info
	deadline := time.Now().Add(5 * time.Second)
	for problem() == "" || NewClient(o.Socket).Get(t.Context(), "/v1/status", &info) != nil {
		must.Need(t, !time.Now().After(deadline), "problem %q, answer %+v", problem(), info)
		time.Sleep(5 * time.Millisecond)
	}
	got := problem()
	must.True(t, strings.Contains(got, "address already in use"), "problem %q", got)
	free.Close()

	url := "http://" + o.Listen + "/v1/"
	var resp *http.Response
	var err error
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if resp, err = http.Get(url + "status"); err == nil || time.Now().After(deadline) {
			break
		}
	}
	must.Need(t, err == nil && resp.StatusCode == http.StatusOK, "GET by TCP: %v, %v", resp, err)
	resp.Body.Close()
	must.Equal(t, "", problem())
	resp, err = http.Post(url+"reload", "", nil)
	must.Need(t, err == nil && resp.StatusCode == http.StatusNotFound, "POST by TCP: %v, %v; want 404", resp, err)
	resp.Body.Close()
	var now Reloaded
	err = NewClient(o.Socket).Post(t.Context(), "/v1/reload", &now)
	must.True(t, err == nil && now.Config == "x", "POST by the socket: %+v, %v", now, err)
}

// A socket that was removed while the agent runs is created again, but does not replace another agent's.
func TestSocketIsMadeAgain(t *testing.T) {
	o := options(t)
	o.Socket = filepath.Join(t.TempDir(), "run", "s")
	var mu sync.Mutex
	var problem error
	failed := map[string]bool{}
	o.Problem = func(_ string, err error) {
		mu.Lock()
		defer mu.Unlock()
		if problem = err; err != nil {
			failed[strings.SplitAfter(err.Error(), "removed")[0]] = true
		}
	}
	is := func(want string) bool {
		mu.Lock()
		defer mu.Unlock()
		return want == "" && problem == nil || problem != nil && want != "" && strings.Contains(problem.Error(), want)
	}
	server := New(o)
	server.retry, server.watchInterval = 5*time.Millisecond, 5*time.Millisecond
	stop := must.Run(t, server.Run)
	wait := func(what string, f func() bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
			must.Need(t, !time.Now().After(deadline), "not within 10s: %s", what)
		}
	}
	answers := func() bool {
		var info Info
		return NewClient(o.Socket).Get(t.Context(), "/v1/status", &info) == nil && is("")
	}
	wait("the first answer", answers)
	for _, path := range []string{o.Socket, filepath.Dir(o.Socket)} {
		must.Do(t, os.RemoveAll(path))
		wait("an answer after the removal of "+path, answers)
	}
	mu.Lock()
	must.True(t, failed["the socket was removed"], "problems %v", failed)
	mu.Unlock()

	// With a rename the path always leads to a socket, so that the agent cannot create its own in between.
	other := must.Get(net.Listen("unix", o.Socket+".other"))(t)
	must.Do(t, os.Rename(o.Socket+".other", o.Socket))
	own := must.Get(os.Lstat(o.Socket))(t)
	wait("the problem", func() bool { return is("another agent is running there") })
	stop()
	now, err := os.Lstat(o.Socket)
	must.True(t, err == nil && os.SameFile(own, now), "the socket of the other agent is gone: %v", err)
	other.Close()
}

func TestSocketThatCannotBeReplaced(t *testing.T) {
	o := options(t)
	must.Do(t, os.MkdirAll(filepath.Join(o.Socket, "file"), 0o755))
	_, err := listenUnix(o.Socket)
	must.True(t, err != nil && strings.HasPrefix(err.Error(), "remove the API socket of a previous run: "),
		"a directory instead of the socket: %v", err)
}

// Over TCP, only requests for an address or a known name are served, so that a page of another site cannot read the
// API.
func TestHostIsChecked(t *testing.T) {
	o := options(t)
	o.Hosts = []string{"lb1", "lb1.example.net"}
	h := New(o).public()
	for host, want := range map[string]int{
		"192.0.2.1:9911": 200, "[2001:db8::1]:9911": 200, "192.0.2.1": 200, "localhost:9911": 200, "lb1": 200,
		"LB1.example.net.:9911": 200, "": 200,
		"evil.example:9911": 421, "lb1.evil.example": 421, "192.0.2.1.evil.example:80": 421,
	} {
		r := httptest.NewRequest(http.MethodGet, "/v1/status", nil)
		r.Host = host
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		must.Row(t, host, want, w.Code)
	}
}
