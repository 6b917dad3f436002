// Package table has what the maps hold: frontends and the slots of their tables, backends, source addresses, the filter
// of addresses, and tunnels.
package table
