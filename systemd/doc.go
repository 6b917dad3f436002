// Package systemd has the interfaces to systemd: the notifications of the agent (sd_notify and the watchdog), and the
// installation of the unit. It imports no other package of the module. Without systemd it does nothing.
//
// The unit loses no connection: the programs stay in the kernel when the agent ends, so a restart, also one by the
// watchdog, is not visible to routers that keep the routes (BGP graceful restart). For the same reason /run/steelyard
// stays, and Install and Uninstall change neither the configuration nor the kernel.
//
// e2e/unit_test.go checks that the capabilities of the unit are needed and sufficient.
package systemd
