package kube

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// apiServer serves the part of the API of Services and Leases that the allocator uses, with only its guarantees.
// Versions grow, a write that requires a version fails if there is a newer one, and a list without a version returns
// what is stored. Any other list and every watch may lag behind.
type apiServer struct {
	t  *testing.T
	mu sync.Mutex // guards all below; never held while time passes

	rng      *rand.Rand
	version  uint64
	services map[string]*core.Service
	history  []change // of services, oldest first
	leases   map[string]*coordination.Lease
	written  func(client string, old, now *core.Service) // called for each write of a status, with mu held
	changed  chan struct{}                               // closed at each change
	refused  map[string]meta.Status                      // Services whose status cannot be written, and the answer
	refusals map[string]int                              // by Service and minute
}

type change struct {
	version uint64
	event   string
	service *core.Service
}

func newAPIServer(t *testing.T, seed uint64) *apiServer {
	return &apiServer{
		t: t, rng: rand.New(rand.NewPCG(seed, seed)), services: map[string]*core.Service{},
		leases: map[string]*coordination.Lease{}, changed: make(chan struct{}),
		written: func(string, *core.Service, *core.Service) {}, refused: map[string]meta.Status{},
		refusals: map[string]int{},
	}
}

// edit changes, creates (old is nil) or deletes (the result is nil) a Service.
func (s *apiServer) edit(name string, f func(old *core.Service) *core.Service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store(name, f)
}

func (s *apiServer) change(name string, f func(*core.Service)) {
	s.edit(name, func(x *core.Service) *core.Service { f(x); return x })
}

func (s *apiServer) store(name string, f func(old *core.Service) *core.Service) *core.Service {
	old := s.services[name]
	now := f(old.DeepCopy())
	if now == nil && old == nil {
		return nil
	}
	s.version++
	e := change{version: s.version, event: "MODIFIED", service: now}
	switch {
	case now == nil || now.DeletionTimestamp != nil && len(now.Finalizers) == 0:
		e.event, e.service = "DELETED", old.DeepCopy()
		delete(s.services, name)
	case old == nil:
		e.event, now.UID = "ADDED", types.UID(fmt.Sprintf("%08d", s.version))
		now.CreationTimestamp = meta.NewTime(time.Now().Truncate(time.Second))
		s.services[name] = now
	default:
		s.services[name] = now
	}
	e.service.ResourceVersion = strconv.FormatUint(s.version, 10)
	s.history = append(s.history, e)
	close(s.changed)
	s.changed = make(chan struct{})
	return e.service.DeepCopy()
}

// listAt returns the Services as they were at a version.
func (s *apiServer) listAt(version uint64) *core.ServiceList {
	at := map[string]*core.Service{}
	for _, c := range s.history {
		if c.version > version {
			break
		}
		if at[nameOf(c.service)] = c.service; c.event == "DELETED" {
			delete(at, nameOf(c.service))
		}
	}
	list := &core.ServiceList{TypeMeta: meta.TypeMeta{Kind: "ServiceList", APIVersion: "v1"}}
	list.ResourceVersion = strconv.FormatUint(version, 10)
	for _, name := range sortedKeys(at) {
		list.Items = append(list.Items, *at[name].DeepCopy())
	}
	return list
}

// client returns a client whose requests are subject to faults.
func (s *apiServer) client(name string, f *faults) kubernetes.Interface {
	return must.Get(kubernetes.NewForConfig(&rest.Config{
		Host: "http://api", Transport: &transport{s, name, f}, QPS: 10_000, Burst: 10_000,
		ContentConfig: rest.ContentConfig{ContentType: "application/json"},
	}))(s.t)
}

// faults are one client's faults. The zero value has none.
type faults struct {
	mu     sync.Mutex
	rate   float64   // of requests that fail, before or after they are served, and of watches that end
	paused time.Time // requests and answers wait until then
	lag    time.Duration
}

func (f *faults) set(rate float64, pause, lag time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rate, f.paused, f.lag = rate, time.Now().Add(pause), lag
}

// wait delays a request or an answer, and reports whether it is lost.
func (f *faults) wait(random float64) (lost bool) {
	f.mu.Lock()
	until, rate, lag := time.Until(f.paused), f.rate, f.lag
	f.mu.Unlock()
	time.Sleep(max(until, 0) + time.Duration(random*float64(lag)))
	return random < rate
}

type transport struct {
	*apiServer
	name string
	*faults
}

func (t *transport) random() float64 {
	t.apiServer.mu.Lock()
	defer t.apiServer.mu.Unlock()
	return t.rng.Float64()
}

var errLost = errors.New("connection lost")

// RoundTrip serves a request. It may arrive long after its client has given up.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		body, _ = io.ReadAll(r.Body)
		r.Body.Close()
	}
	type result struct {
		response *http.Response
		err      error
	}
	done := make(chan result, 1)
	go func() {
		if t.wait(t.random()) {
			done <- result{err: errLost}
			return
		}
		response := t.serve(r, body)
		if t.wait(t.random()) && r.URL.Query().Get("watch") == "" {
			done <- result{err: errLost}
			return
		}
		done <- result{response, nil}
	}()
	select {
	case x := <-done:
		return x.response, x.err
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

func respond(code int, x any) *http.Response {
	text, _ := json.Marshal(x)
	return &http.Response{
		StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(bytes.NewReader(text)),
	}
}

func status(code int32, reason meta.StatusReason) *http.Response {
	s := meta.Status{Status: "Failure", Reason: reason, Code: code}
	s.Kind, s.APIVersion = "Status", "v1"
	return respond(int(code), s)
}

// refusals are responses to writes of a status that were not applied.
var refusals = []meta.Status{
	{Code: http.StatusForbidden, Reason: meta.StatusReasonForbidden, Message: "a policy denied request: no"},
	{Code: http.StatusBadRequest, Message: `admission webhook "x" denied the request: no`},
	{Code: http.StatusConflict, Reason: meta.StatusReasonConflict, Message: `admission webhook "x" denied the request`},
	{Code: http.StatusInternalServerError, Message: "etcdserver: request is too large"},
	{Code: http.StatusInternalServerError, Reason: meta.StatusReasonInternalError,
		Message: `Internal error occurred: failed calling webhook "x": connection refused`},
}

func init() {
	for i := range refusals {
		refusals[i].Kind, refusals[i].APIVersion, refusals[i].Status = "Status", "v1", "Failure"
	}
}

func (t *transport) serve(r *http.Request, body []byte) *http.Response {
	path, q := strings.Split(strings.Trim(r.URL.Path, "/"), "/"), r.URL.Query()
	switch {
	case q.Get("sendInitialEvents") != "":
		return status(http.StatusUnprocessableEntity, meta.StatusReasonInvalid)
	case q.Get("watch") != "":
		return t.watchServices(r.Context(), q.Get("resourceVersion"))
	}
	s := t.apiServer
	s.mu.Lock()
	defer s.mu.Unlock()
	kind := path[len(path)-1]
	if len(path) > 4 {
		kind = path[4]
	}
	switch {
	case kind == "services" && len(path) == 3:
		return respond(http.StatusOK, s.listAt(s.listVersion(q.Get("resourceVersion"))))
	case kind == "services":
		name := path[3] + "/" + path[5]
		if s.services[name] == nil {
			return status(http.StatusNotFound, meta.StatusReasonNotFound)
		}
		if r.Method == http.MethodGet {
			return respond(http.StatusOK, s.services[name])
		}
		if answer, ok := s.refused[name]; ok {
			this := fmt.Sprint(name, time.Now().Unix()/60)
			if s.refusals[this]++; s.refusals[this] == 200 {
				s.t.Errorf("200 writes were refused within a minute: %s is written without a delay", name)
			}
			return respond(int(answer.Code), answer)
		}
		return t.patchStatus(name, q.Get("fieldManager"), body)
	case kind == "servicecidrs":
		return status(http.StatusNotFound, meta.StatusReasonNotFound)
	case strings.Contains(r.URL.Path, "/leases"):
		return s.lease(r.Method, path, body)
	}
	return respond(http.StatusCreated, map[string]any{"kind": "Event", "apiVersion": "v1"})
}

// listVersion returns the version of a list: the stored one if none is required, otherwise any that is not older.
func (s *apiServer) listVersion(required string) uint64 {
	if required == "" {
		return s.version
	}
	least, _ := strconv.ParseUint(required, 10, 64)
	if least == 0 {
		least = s.version - min(s.version, 30)
	}
	return least + s.rng.Uint64N(s.version-least+1)
}

// patchStatus applies a merge patch of a field manager.
func (t *transport) patchStatus(name, manager string, body []byte) *http.Response {
	var p struct {
		Metadata struct {
			ResourceVersion string
			Finalizers      *[]string
		}
		Status struct {
			LoadBalancer *core.LoadBalancerStatus
			Conditions   json.RawMessage // null removes them
		}
	}
	must.True(t.t, json.Unmarshal(body, &p) == nil, "patch %s", body)
	s := t.services[name]
	if p.Metadata.ResourceVersion != s.ResourceVersion {
		return status(http.StatusConflict, meta.StatusReasonConflict)
	}
	old := s.DeepCopy()
	now := t.store(name, func(s *core.Service) *core.Service {
		by, final := strings.Join(managers(s, addressField), ""), strings.Join(managers(s, finalizerField), "")
		if p.Metadata.Finalizers != nil {
			s.Finalizers = *p.Metadata.Finalizers
		}
		if !slices.Contains(old.Finalizers, finalizer) {
			final = manager
		}
		if p.Status.LoadBalancer != nil {
			s.Status.LoadBalancer = *p.Status.LoadBalancer
			by = manager
		}
		setManagers(s, by, final)
		if len(p.Status.Conditions) > 0 {
			s.Status.Conditions = nil
			err := json.Unmarshal(p.Status.Conditions, &s.Status.Conditions)
			must.True(t.t, err == nil, "conditions: %v", err)
		}
		return s
	})
	t.written(t.name, old, now)
	return respond(http.StatusOK, now)
}

// setManagers records who has written the addresses in a status, and who wrote the finalizer.
func setManagers(s *core.Service, status, final string) {
	s.ManagedFields = []meta.ManagedFieldsEntry{{
		Manager: status, FieldsV1: &meta.FieldsV1{Raw: []byte(`{"f:status":{"f:loadBalancer":{"f:ingress":{}}}}`)},
	}}
	if slices.Contains(s.Finalizers, finalizer) {
		raw := []byte(`{"f:metadata":{"f:finalizers":{"v:\"` + finalizer + `\"":{}}}}`)
		s.ManagedFields = append(s.ManagedFields, meta.ManagedFieldsEntry{
			Manager: final, FieldsV1: &meta.FieldsV1{Raw: raw},
		})
	}
}

func (s *apiServer) lease(method string, path []string, body []byte) *http.Response {
	var o coordination.Lease
	if len(body) > 0 {
		must.True(s.t, json.Unmarshal(body, &o) == nil, "Lease %s", body)
	}
	name := o.Name
	if last := path[len(path)-1]; last != "leases" {
		name = last
	}
	old := s.leases[name]
	switch {
	case method != http.MethodPost && old == nil:
		return status(http.StatusNotFound, meta.StatusReasonNotFound)
	case method == http.MethodGet:
		return respond(http.StatusOK, old)
	case method == http.MethodPost && old != nil:
		return status(http.StatusConflict, meta.StatusReasonAlreadyExists)
	case method == http.MethodPut && old.ResourceVersion != o.ResourceVersion:
		return status(http.StatusConflict, meta.StatusReasonConflict)
	}
	s.version++
	o.ResourceVersion = strconv.FormatUint(s.version, 10)
	s.leases[name] = &o
	return respond(http.StatusOK, &o)
}

// watchServices streams the changes after a version, with a lag, until a fault ends it.
func (t *transport) watchServices(ctx context.Context, from string) *http.Response {
	after, _ := strconv.ParseUint(from, 10, 64)
	r, w := io.Pipe()
	go func() {
		defer w.Close()
		stop := context.AfterFunc(ctx, func() { w.Close() })
		defer stop()
		for {
			t.apiServer.mu.Lock()
			i, _ := slices.BinarySearchFunc(t.history, after+1, func(c change, v uint64) int {
				return cmp.Compare(c.version, v)
			})
			next, more := t.history[i:], t.changed
			t.apiServer.mu.Unlock()
			for _, c := range next {
				if t.wait(t.random()) {
					return
				}
				text, _ := json.Marshal(c.service)
				typed := bytes.Replace(text, []byte("{"), []byte(`{"kind":"Service","apiVersion":"v1",`), 1)
				if _, err := fmt.Fprintf(w, `{"type":%q,"object":%s}`+"\n", c.event, typed); err != nil {
					return
				}
				after = c.version
			}
			if len(next) > 0 {
				continue
			}
			select {
			case <-ctx.Done():
				return
			case <-more:
			}
		}
	}()
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: r}
}
