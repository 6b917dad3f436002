// Package lab builds networks of hosts from the kernel's namespaces: hosts, links, bridges, routes, processes, and
// Steelyard agents. Because `steelyard demo` uses it as well as tests, it returns errors and does not import package
// testing.
//
// The packages below it import it, not the reverse:
//
//   - traffic: servers and clients. The demo also uses it.
//   - peers: routing daemons, BIRD and FRR.
//   - kube: a Kubernetes control plane, kube-proxy and kubelets.
//   - labtest: all of these, for tests.
//
// Guarantees:
//
//   - It needs root, and no other program except for Enter and Drop: it sets links, routes and offloads through netlink
//     and ioctl.
//   - A Host has its own network and mount namespaces. In the mount namespace, /sys shows the host's interfaces, /run
//     is an empty tmpfs and /sys/fs/bpf is a new bpffs, so agents on one kernel share neither pins nor sockets. Hosts
//     share the rest of the file system and the control groups.
//   - Nothing has a name outside this process: no /run/netns entry, no interface in the root namespace, no file. (The
//     exceptions are a kubelet's control groups, which its node's Close removes.) A namespace exists as long as a
//     process or descriptor refers to it. The kernel kills a process when the thread that started it ends
//     (PR_SET_PDEATHSIG), so nothing remains even after a SIGKILL of this process.
//   - Closing a Lab ends the processes first (SIGTERM, then SIGKILL after StopGrace), then the servers, then the
//     namespaces. Close may be called again, and by a deferred function during a panic.
//
// Threads: namespaces belong to threads. A Host keeps one locked thread in its namespaces, the anchor. It starts the
// processes, because the parent-death signal is tied to the thread that started the child. Do uses a new thread each
// time and ends it afterwards, because a thread that has unshared its file system attributes cannot share them again. A
// socket stays in the namespace where it was created, so any goroutine may use the results of Listen and Dial.
//
// Reading order: thread.go, namespace.go, host.go, link.go, address.go, power.go, route.go (hosts and links);
// process.go, log.go (programs); agent.go, agentconfig.go (Steelyard); topology.go (the network of most tests).
package lab
