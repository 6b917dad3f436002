// Package flow walks through the tables of flows: it removes flows that have ended or expired, resets their clients,
// counts and lists the others, and samples their clients.
package flow
