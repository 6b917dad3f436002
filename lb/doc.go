// Package lb is the model and the rules of Steelyard: Services, Frontends, Backends and VIPs, how backends are selected
// for new flows, the lookup tables, and the order of calls to the datapath and the announcers.
//
// It imports only the standard library and does not depend on BPF, BGP, sockets, TOML or Kubernetes. Data flows one
// way:
//
//	lb/file ─┐ Put(Service) Delete(name) Complete(source)
//	lb/kube ─┤
//	         ▼
//	┌──────────────────── Engine (one goroutine) ────────────────────┐
//	│ Service + Health + Drains ─► Build ─► Plan      (pure)         │  Delta   ┌──────────┐
//	│ datapathState:      Serve(want, announce)  ────────────────────┼─────────►│ Datapath │──► kernel
//	│                                                                │◄─────────└──────────┘
//	│ routes:             Announce(want, healthy, datapath) ─────────┼─────────►┌──────────┐  errors
//	│                                                                │◄─────────│ Announcer│──► routers
//	│                     Checks ────────────────────────────────────┼─────────►┌──────────┐
//	│ Health ◄───────────────────────────────────────────────────────┼──────────│ Prober   │──► sockets
//	└──────────────┬─────────────────────────────────────────────────┘          └──────────┘
//	               ▼ Status: API, metrics, command line
//
// Guarantees, even if consumers fail or are slow:
//
//   - A VIP is announced only while the datapath has confirmed that it serves it (order.go).
//   - A VIP is removed from the datapath only after the announcers have confirmed that they no longer announce it.
//   - A plan is immutable. The datapath receives the difference per Frontend, and a failed Frontend is retried alone.
//
// To follow one value, read in this order: Service (service.go), ServicePort and Frontend (port.go), Check and Health
// (check.go), Build and Plan (plan.go), Announcement and the consumer interfaces (consumer.go), Serve and Announce
// (order.go), datapathState (datapath.go), routes (routes.go), Engine (engine.go), Status (status.go).
package lb
