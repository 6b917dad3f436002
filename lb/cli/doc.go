// Package cli has the command table, and the commands that are clients of the admin API (package lb/admin) or need only
// files: check, install, manifest. Commands that load BPF, speak BGP, watch a cluster or build networks (run, demo,
// cleanup) are passed to Main as functions, so this package imports none of their libraries (deps_test.go).
//
// Main has no process state: it takes arguments and writers and returns the exit code, so tests call it. Exit codes are
// a contract: 0 success, 1 an error on stderr, 2 wrong usage.
package cli
