// Package flow walks through the flow tables. It removes ended and expired flows, resets their clients, counts and
// lists the others, and samples their clients.
package flow
