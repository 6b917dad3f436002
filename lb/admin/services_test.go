package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// Services that wait for an address stand among the others, by name.
func TestServicesAreSorted(t *testing.T) {
	o := options(t)
	o.Status = func(context.Context) (lb.Status, error) {
		// The last one is of an address that is refused.
		rows := []lb.ServiceStatus{{Service: "b", Port: 443}, {Service: "b", Port: 80}, {Service: "d"}, {Service: "b"}}
		return lb.Status{Services: rows}, nil
	}
	for _, waiting := range []struct {
		rows func() []lb.ServiceStatus
		want string
	}{
		{nil, "[{b 443} {b 80} {b 0} {d 0}]"},
		{func() []lb.ServiceStatus { return []lb.ServiceStatus{{Service: "a"}, {Service: "c"}} },
			"[{a 0} {b 443} {b 80} {b 0} {c 0} {d 0}]"},
	} {
		o.Waiting = waiting.rows
		w := httptest.NewRecorder()
		New(o).Handler(false).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/services", nil))
		var got []struct {
			Service string
			Port    int
		}
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || fmt.Sprint(got) != waiting.want {
			t.Errorf("%v %v; want %s", got, err, waiting.want)
		}
	}
	o.Waiting = func() []lb.ServiceStatus { return nil }
	o.Status = func(context.Context) (lb.Status, error) { return lb.Status{Services: []lb.ServiceStatus{}}, nil }
	if code, body := get(t, o, "/v1/services"); code != http.StatusOK || body != "[]" {
		t.Errorf("without services: %d %s", code, body)
	}
}
