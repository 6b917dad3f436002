// Package lab builds networks of machines out of the kernel's namespaces: hosts, links, bridges, routers that run BIRD
// or FRR, servers, clients, and Steelyard agents as real processes. Tests use it, and so does `steelyard demo`; it
// therefore returns errors and knows nothing of package testing (package labtest is the thin layer for tests).
//
// What it guarantees:
//
//   - It needs root, and no other program than the routers asked for: links, routes and offloads are set by netlink and
//     ioctl from this process.
//   - A Host has a network namespace of its own, and a mount namespace in which /sys shows its own interfaces, /run is
//     empty and private and /sys/fs/bpf is a bpffs of its own, so that agents on one kernel do not share pins or
//     sockets. Everything else of the file system is shared; cgroups stay where they were.
//   - Nothing has a name outside this process: no /run/netns entry, no interface in the root namespace, no file (but the
//     control groups of a kubelet, which are removed when its node is closed). A
//     namespace lives as long as a process or a descriptor refers to it. Processes started here die with the thread
//     that started them (PR_SET_PDEATHSIG), so even after SIGKILL of this process nothing stays.
//   - Close of a Lab ends processes first (SIGTERM, then SIGKILL within StopGrace), then servers, then namespaces; it
//     may be called again, and from a deferred function during a panic.
//
// Why threads: a namespace belongs to a thread. A Host keeps one locked thread inside (its anchor) for starting
// processes, because the death signal of a child is tied to the thread that made it; Do takes a fresh thread each time
// and throws it away afterwards, because a thread that has left the mount namespace cannot be made whole again. Sockets
// stay in the namespace they were made in, so what Listen and Dial return may be used from any goroutine.
//
// Reading order: thread.go, namespace.go, host.go, link.go, route.go (machines and wires); process.go, bird.go, frr.go,
// agent.go, controlplane.go, kubelet.go (programs); http.go, echo.go, client.go, conns.go (traffic); topology.go (the network most tests want).
package lab
