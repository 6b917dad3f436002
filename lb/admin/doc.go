// Package admin is the API of a running agent: HTTP on a unix socket (mode 0660), and read-only on a TCP address if one
// is configured.
//
//	GET  /v1/status /v1/services /v1/backends /v1/routes /v1/peers /v1/members   JSON; the objects of lb.Status
//	GET  /v1/flows /v1/explain                                       JSON; from the datapath
//	GET  /v1/doctor                                                  JSON; on the unix socket only
//	POST /v1/drain /v1/undrain /v1/reload /v1/apply /v1/confirm      on the unix socket only
//	POST /v1/restart /v1/weight /v1/flows/end                        on the unix socket only
//	GET  /metrics    Prometheus
//	GET  /healthz    200 while the engine responds, otherwise 503
//	GET  /           the dashboard, one page without dependencies
//
// Each request reads the current status of the engine; nothing is cached. The functions in Options carry out a POST.
// The package depends neither on the datapath nor on the configuration.
package admin
