// Package systemd is the interface to systemd: it sends the agent's notifications (sd_notify and the watchdog) and
// installs the unit. It imports no other package of the module. Without systemd it does nothing.
//
// A restart of the unit, even by the watchdog, interrupts no connection: the programs stay in the kernel when the agent
// exits, and routers keep the routes (BGP graceful restart). For the same reason, the unit preserves /run/steelyard,
// and Install and Uninstall change neither the configuration nor the kernel.
//
// e2e/unit_test.go checks that the unit grants the necessary capabilities and no others.
package systemd
