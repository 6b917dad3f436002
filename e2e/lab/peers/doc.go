// Package peers provides the BGP peers of a lab: hosts that run a real routing daemon, BIRD 2 or FRRouting, with the
// same configuration type.
//
// A Router imports its neighbours' announcements into its host's kernel. Tests check this kernel's routes
// (lab.Host.NextHops), and the sessions through the daemon's shell. The daemons end with the host.
package peers
