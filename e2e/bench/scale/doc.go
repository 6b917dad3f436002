// Package scale measures the cost of a change with few and with many services, backends and nodes: in the datapath
// alone (Apply), and in an agent with a configuration file (Agent).
package scale
