// Package cli has the commands, and is the only place that wires the parts together: every other package gets what it
// needs from here and knows none of its neighbours.
//
// Main is a program without the process: it takes arguments and writers and returns the exit code, so tests call it.
// Exit codes are a contract: 0 done, 1 a clear error on stderr, 2 wrong usage.
package cli
