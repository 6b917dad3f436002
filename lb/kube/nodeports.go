package kube

import (
	"time"

	core "k8s.io/api/core/v1"
)

// This file answers requests at health check node ports.

// portRetry is the delay before the agent tries again to listen on a health check node port that is in use.
const portRetry = 10 * time.Second

// proxyStart is how long after boot a service proxy may take to start. Until then the agent leaves the ports to the
// proxy.
const proxyStart = 3 * time.Minute

// NodePorts answers at health check node ports. Services are named "namespace/name".
type NodePorts interface {
	// Serve answers with the number of ready endpoints on this node. If other is true, another program serves the
	// Service, so this agent's datapath need not.
	Serve(service string, port uint16, readyLocal int, other bool) error
	Stop(service string)
}

// nodePort answers at a service's health check node port unless the node's service proxy does.
func (s *Source) nodePort(service *core.Service, readyLocal int) {
	if !s.o.IsProxy && !s.conditions.noProxy() {
		s.closePort(nameOf(service))
		return
	}
	if wait := proxyStart - time.Since(s.o.Booted); !s.o.IsProxy && s.o.ProxyHealthz != "" && wait > 0 {
		s.queue.AddAfter(nameOf(service), wait)
		return
	}
	s.servePort(service, readyLocal, false)
}

// portOfOther answers at the health check node port of a Service that another program serves, if this agent is the
// service proxy, because nothing else answers there.
func (s *Source) portOfOther(name string) {
	x, ok, err := s.services.GetByKey(name)
	if err != nil || !ok || !s.o.IsProxy || !handled(x.(*core.Service)) {
		s.closePort(name)
		return
	}
	service := x.(*core.Service)
	v := translate(service, settings{}, nil, s.slicesOf(name), s.top, false, false, s.o.MaxEndpoints)
	s.servePort(service, v.readyLocal, true)
}

// servePort answers at a Service's health check node port, if it has one.
func (s *Source) servePort(service *core.Service, readyLocal int, other bool) {
	name, port := nameOf(service), uint16(service.Spec.HealthCheckNodePort)
	if s.o.NodePorts == nil || !isLocal(service) || port == 0 {
		s.closePort(name)
		return
	}
	if err := s.o.NodePorts.Serve(name, port, readyLocal, other); err != nil {
		// Reason and message are kube-proxy's (pkg/proxy/healthcheck/service_health.go).
		s.events.Eventf(service, core.EventTypeWarning, "FailedToStartServiceHealthcheck",
			"node %s failed to start healthcheck %q on port %d: %v", s.o.Node, name, port, err)
		s.queue.AddAfter(name, portRetry)
	}
}

// closePort stops answering at a service's health check node port.
func (s *Source) closePort(service string) {
	if s.o.NodePorts != nil {
		s.o.NodePorts.Stop(service)
	}
}
