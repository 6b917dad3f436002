package admin

import (
	"context"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/lb"
)

// CallMetrics counts and times the engine's calls to its consumers, and times changes until they take effect.
type CallMetrics struct {
	calls   *prometheus.HistogramVec
	errors  *prometheus.CounterVec
	changes *prometheus.HistogramVec
}

// StateMetrics exports the state of the engine.
type StateMetrics struct {
	status func(context.Context) (lb.Status, error)
	pools  func() []lb.Pool
}

var (
	descBackends = prometheus.NewDesc("steelyard_engine_backends",
		"Backends of a service by state.", []string{"service", "state"}, nil)
	descFrontends = prometheus.NewDesc("steelyard_frontend_backends",
		"Healthy backends of a frontend.", []string{"service", "vip", "port", "protocol"}, nil)
	descServices = prometheus.NewDesc("steelyard_engine_services",
		"Configured services.", nil, nil)
	descAnnounced = prometheus.NewDesc("steelyard_announce_vip_announced",
		"1 while a VIP is announced, otherwise 0.", []string{"vip"}, nil)
	descSettled = prometheus.NewDesc("steelyard_engine_settled",
		"1 once every source is complete and every check has a result, otherwise 0.", nil, nil)
	descPools = prometheus.NewDesc("steelyard_pool_addresses",
		"Addresses of a pool that services have (assigned) or do not have (free, including .0 and .255).",
		[]string{"pool", "state"}, nil)
)

// NewCallMetrics returns a collector without calls. It is separate from StateMetrics because the engine needs it.
func NewCallMetrics() *CallMetrics {
	return &CallMetrics{
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "steelyard_engine_apply_duration_seconds", Help: "Duration of calls to a consumer.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9),
		}, []string{"consumer"}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "steelyard_engine_apply_errors_total",
			Help: "Failed calls to a consumer, retries included.",
		}, []string{"consumer"}),
		changes: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "steelyard_engine_change_duration_seconds",
			Help: "Time from the report of a change (to a service, an endpoint, a check or the machine) until " +
				"the kernel forwards accordingly (datapath), or its route is sent to (announced) or withdrawn from " +
				"(withdrawn) all peers. It excludes the time to detect the change: for a failed backend, fall times " +
				"the interval of its check.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 16),
		}, []string{"effect"}),
	}
}

// Observe is lb.EngineOptions.Observe.
func (m *CallMetrics) Observe(consumer string, took time.Duration, err error) {
	m.calls.WithLabelValues(consumer).Observe(took.Seconds())
	if err != nil {
		m.errors.WithLabelValues(consumer).Inc()
	}
}

// InEffect is lb.EngineOptions.InEffect.
func (m *CallMetrics) InEffect(e lb.Effect, took time.Duration) {
	m.changes.WithLabelValues(string(e)).Observe(took.Seconds())
}

// Describe implements prometheus.Collector.
func (m *CallMetrics) Describe(ch chan<- *prometheus.Desc) {
	m.calls.Describe(ch)
	m.errors.Describe(ch)
	m.changes.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *CallMetrics) Collect(ch chan<- prometheus.Metric) {
	m.calls.Collect(ch)
	m.errors.Collect(ch)
	m.changes.Collect(ch)
}

// NewStateMetrics returns a collector that calls status and pools at each scrape.
func NewStateMetrics(status func(context.Context) (lb.Status, error), pools func() []lb.Pool) *StateMetrics {
	return &StateMetrics{status, pools}
}

// Describe implements prometheus.Collector.
func (m *StateMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descBackends, descFrontends, descServices, descAnnounced, descSettled, descPools,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It exports nothing if the engine does not respond in time.
func (m *StateMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	st, err := m.status(ctx)
	if err != nil {
		return
	}
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	type key struct {
		service string
		state   lb.State
	}
	backends, services := map[key]int{}, map[string]struct{}{}
	for _, s := range st.Services {
		services[s.Service] = struct{}{}
		if !s.Address.IsValid() {
			continue // the service waits for one
		}
		healthy, f := 0, s.Frontend()
		for _, b := range s.Backends {
			healthy += one(b.State == lb.StateHealthy)
		}
		gauge(descFrontends, healthy, s.Service, f.VIP.String(), f.Ports(), f.Protocol.String())
	}
	for _, b := range st.Backends {
		backends[key{b.Service, b.State}]++
	}
	for service := range services {
		for _, state := range []lb.State{lb.StateUnknown, lb.StateHealthy, lb.StateUnhealthy, lb.StateDraining} {
			gauge(descBackends, backends[key{service, state}], service, state.String())
		}
	}
	for _, r := range st.Routes {
		gauge(descAnnounced, one(r.Announced), r.Address.String())
	}
	for pool, n := range poolAddresses(m.pools(), st) {
		for state, n := range map[string]float64{"assigned": n.assigned, "free": n.size - n.assigned} {
			ch <- prometheus.MustNewConstMetric(descPools, prometheus.GaugeValue, n, pool, state)
		}
	}
	gauge(descServices, len(services))
	gauge(descSettled, one(st.Settled))
}

type poolCount struct{ size, assigned float64 }

// poolAddresses counts the addresses of each pool, and those that services have.
func poolAddresses(pools []lb.Pool, st lb.Status) map[string]poolCount {
	vips := map[netip.Addr]struct{}{}
	for _, s := range st.Services {
		vips[s.Address] = struct{}{}
	}
	all := map[string]poolCount{}
	for _, p := range pools {
		n := all[p.Name]
		for _, r := range p.Ranges {
			n.size += r.Size()
		}
		for vip := range vips {
			n.assigned += float64(one(p.Contains(vip)))
		}
		all[p.Name] = n
	}
	return all
}
