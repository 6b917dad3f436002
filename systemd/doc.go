// Package systemd is what the program has to do with systemd: telling it how the agent is (sd_notify and the watchdog),
// and installing the unit. It knows nothing of the rest; outside of systemd everything here is a no-op.
package systemd
