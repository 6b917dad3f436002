// Package admin is how people and programs talk to a running agent: HTTP on a unix socket (mode 0660), and the same
// read-only on a TCP address when one is configured.
//
//	GET /v1/status /v1/services /v1/backends /v1/routes /v1/peers   JSON; the objects are those of lb.Status
//	GET /metrics    Prometheus
//	GET /healthz    200 while the engine answers, else 503
//	GET /           the dashboard, one page without dependencies
//
// It asks the engine for a Status at each request and keeps nothing, so what it says is never stale. It never changes
// anything.
package admin
