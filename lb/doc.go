// Package lb is the vocabulary and the rules of Steelyard: what a Service, a Frontend, a Backend and a VIP are, which
// backends may be used, how a table is filled, and in which order the kernel and the routers are told.
//
// It imports the standard library only, and knows nothing of BPF, BGP, sockets, TOML or Kubernetes. Data flows one way:
//
//	lb/file ─┐ Put(Service) Delete(name) Complete(source)
//	lb/kube ─┤
//	         ▼
//	┌──────────────────── Engine (one goroutine) ────────────────────┐
//	│ Service + Health ─► Build ─► Plan               (pure)         │  Delta   ┌──────────┐
//	│                     Serve(want, announce)  ────────────────────┼─────────►│ Datapath │──► kernel
//	│                                                                │◄─────────└──────────┘
//	│                     Announce(want, healthy, datapath) ─────────┼─────────►┌──────────┐  in force / not,
//	│                                                                │◄─────────│ Announcer│──► routers
//	│                     Checks ────────────────────────────────────┼─────────►┌──────────┐
//	│ Health ◄───────────────────────────────────────────────────────┼──────────│ Prober   │──► sockets
//	└──────────────┬─────────────────────────────────────────────────┘          └──────────┘
//	               ▼ Status: API, metrics, command line
//
// What holds at every moment, whatever fails or is slow:
//
//   - A VIP is announced only while the datapath has confirmed that it serves it (order.go).
//   - A VIP leaves the datapath only after the announcers have confirmed that they no longer announce it.
//   - A plan is immutable; consumers get the difference, per Frontend, and one that fails is retried alone.
//
// A reader who follows one value meets, in this order: Service (service.go), Check and Health (check.go), Plan
// (plan.go), Announcement and the consumer interfaces (consumer.go), order.go, engine.go, Status (status.go).
package lb
