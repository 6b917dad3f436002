// Package peers provides the BGP peers of a lab: a host that runs a real routing daemon, BIRD 2 or FRRouting, with the
// same configuration for both.
//
// A Router imports its neighbours' announcements into its host's kernel. Tests look at the routes of that kernel
// (lab.Host.NextHops), and at the sessions through the daemon's shell. The daemons end with the host.
package peers
