// Package hook attaches the programs to interfaces and keeps them attached: as XDP, tcx or clsact, with their pins, and
// beside programs of other software. It also adds the rule that sends health checks through them.
package hook
