// Package agent is the daemon: it creates the datapath, the announcers, the health checks, the sources and the admin
// API from one configuration, connects them through the engine (package lb), and runs them. It is the only package that
// imports all of them; they do not import each other.
//
// New creates everything in this order, so that each constructor gets complete arguments:
//
//	node facts ─► announcers ─► cluster keys ─► datapath ─► prober ─► engine ─► drain store ─► cluster ─► admin API
//
// The keys are read from the API server first, because they include the hash seed, which the datapath needs to open.
// New waits for them for a limited time (clusterkeys.go).
//
// There is one cycle: the engine needs the prober, and the prober needs a receiver for its health reports. A
// healthRelay is created before both.
//
// Run ends in this order: the engine withdraws the routes and waits for the confirmation; then all other tasks stop,
// including the BGP sessions that sent the withdrawals. The programs stay in the kernel and continue to forward.
//
// Reloads (SIGHUP, POST /v1/reload) replace services, pools, checks, tunnel keys and the log level. A configuration
// that preflight rejects changes nothing.
package agent
