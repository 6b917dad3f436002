// Package systemd is what the program has to do with systemd: telling it how the agent is (sd_notify and the watchdog),
// and installing the unit. It knows nothing of the rest; outside of systemd everything here is a no-op.
//
// The unit is made to lose no connection: what it runs leaves its programs in the kernel when it ends, so a restart, also
// one that the watchdog forces, costs nothing that routers holding the routes would notice (BGP graceful restart). For
// the same reason /run/steelyard stays, and Install and Uninstall touch neither the configuration nor the kernel.
//
// That each capability in the unit is needed, and that they suffice, is tried in e2e/unit_test.go.
package systemd
