package bgp

import "github.com/prometheus/client_golang/prometheus"

var (
	peerUp = prometheus.NewDesc("steelyard_bgp_peer_up",
		"1 while the BGP session with the peer is established, otherwise 0.", []string{"peer"}, nil)
	routesAnnounced = prometheus.NewDesc("steelyard_bgp_routes_announced",
		"Routes announced to the peer.", []string{"peer"}, nil)
	transitions = prometheus.NewDesc("steelyard_bgp_session_transitions_total",
		"Transitions of the BGP session with the peer to up and down.", []string{"peer", "to"}, nil)
	bfdDiscarded = prometheus.NewDesc("steelyard_bfd_discarded_packets_total",
		"BFD packets that match no session or are rejected.", []string{"reason"}, nil)
)

// Describe implements prometheus.Collector.
func (s *Speaker) Describe(ch chan<- *prometheus.Desc) {
	ch <- peerUp
	ch <- routesAnnounced
	ch <- transitions
	ch <- bfdDiscarded
}

// Collect implements prometheus.Collector.
func (s *Speaker) Collect(ch chan<- prometheus.Metric) {
	for reason, n := range s.bfd.Discarded() {
		ch <- prometheus.MustNewConstMetric(bfdDiscarded, prometheus.CounterValue, float64(n), reason)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for addr, p := range s.sessions {
		peer, up := addr.String(), 0.0
		if p.state == stateEstablished {
			up = 1
		}
		ch <- prometheus.MustNewConstMetric(peerUp, prometheus.GaugeValue, up, peer)
		routes := float64(s.withdrawals.routes(addr))
		ch <- prometheus.MustNewConstMetric(routesAnnounced, prometheus.GaugeValue, routes, peer)
		ch <- prometheus.MustNewConstMetric(transitions, prometheus.CounterValue, float64(p.ups), peer, "up")
		ch <- prometheus.MustNewConstMetric(transitions, prometheus.CounterValue, float64(p.downs), peer, "down")
	}
}
