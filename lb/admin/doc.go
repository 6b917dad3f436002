// Package admin is the API of a running agent: HTTP on a unix socket (mode 0660), and read-only on a TCP address if one
// is configured.
//
//	GET  /v1/status /v1/services /v1/backends /v1/routes /v1/peers   JSON; the objects of lb.Status
//	GET  /v1/flows /v1/explain                                       JSON; from the datapath
//	POST /v1/drain /v1/undrain /v1/reload /v1/restart                on the unix socket only
//	GET  /metrics    Prometheus
//	GET  /healthz    200 while the engine responds, otherwise 503
//	GET  /           the dashboard, one page without dependencies
//
// Each request reads the current status of the engine; nothing is cached. The functions in Options carry out a POST.
// The package depends neither on the datapath nor on the configuration.
package admin
