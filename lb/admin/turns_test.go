package admin

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func request(path string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.Host = "192.0.2.1:9911"
	return r
}

// By TCP one walk through the flows runs at a time, for 200 ms; the socket has neither limit.
func TestWalksOfReadersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := options(t)
		o.Flows = func(ctx context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			if want.Limit > flowLimit {
				t.Errorf("limit %d", want.Limit)
			}
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
		if took := time.Since(start); first.Code != 200 || !strings.Contains(first.Body.String(), `"more": true`) ||
			took != 200*time.Millisecond {
			t.Errorf("the first walk: %d %s after %s", first.Code, first.Body, took)
		}
	})
}

// unreadable is a client that does not read its answer until it is released.
type unreadable struct {
	*httptest.ResponseRecorder
	release chan struct{}
}

func (w unreadable) Write(p []byte) (int, error) { <-w.release; return w.ResponseRecorder.Write(p) }

// At most four requests by TCP are worked on at once; the others wait, but not for long. Clients that do not read their
// answers are none of the four, and may not have more than some megabytes.
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
