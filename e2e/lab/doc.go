// Package lab builds networks of hosts from the kernel's namespaces: hosts, links, bridges, routes, processes, and
// Steelyard agents. Tests use it, and so does `steelyard demo`; it therefore returns errors and does not import package
// testing.
//
// The packages below it each import it, and none of them is imported here:
//
//   - traffic: servers and clients. The demo uses it too.
//   - peers: routing daemons, BIRD and FRR.
//   - kube: a Kubernetes control plane, kube-proxy and kubelets.
//   - labtest: all of these in a test.
//
// Guarantees:
//
//   - It needs root and no other program: it sets links, routes and offloads by netlink and ioctl.
//   - A Host has a network namespace and a mount namespace of its own. In the mount namespace /sys shows the interfaces
//     of the host, /run is an empty tmpfs and /sys/fs/bpf is a new bpffs, so that agents on one kernel share neither
//     pins nor sockets. Hosts share the rest of the file system, and the control groups.
//   - Nothing has a name outside this process: no /run/netns entry, no interface in the root namespace, no file. (The
//     control groups of a kubelet, which Close of its node removes, are the exception.) A namespace exists as long as a
//     process or a descriptor refers to it. The kernel kills a process when the thread that started it ends
//     (PR_SET_PDEATHSIG), so that nothing remains after SIGKILL of this process either.
//   - Close of a Lab ends the processes first (SIGTERM, then SIGKILL after StopGrace), then the servers, then the
//     namespaces. It may be called again, and by a deferred function during a panic.
//
// Threads: a namespace belongs to a thread. A Host keeps one locked thread in its namespaces, the anchor, which
// starts the processes, because the parent-death signal is tied to the thread that started the child. Do uses a new
// thread each time and ends it afterwards, because a thread that has unshared its file system attributes cannot share
// them again. A socket stays in the namespace where it was made, so any goroutine may use what Listen and Dial return.
//
// Reading order: thread.go, namespace.go, host.go, link.go, address.go, power.go, route.go (hosts and links);
// process.go, log.go (programs); agent.go, agentconfig.go (Steelyard); topology.go (the network of most tests).
package lab
