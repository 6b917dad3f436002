// Package hook attaches the programs to interfaces and keeps them attached: XDP, tcx or clsact, next to programs of
// other software, with their pins, and with the rule that sends health checks through them.
package hook
