// Package table maintains the contents of the maps: frontends and the slots of their tables, backends, source
// addresses, the address filter, and tunnels.
package table
