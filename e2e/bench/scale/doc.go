// Package scale measures what a change costs with few and with many services, backends and nodes: in the datapath
// alone (Apply), and of an agent with a configuration file (Agent).
package scale
