#!/bin/sh
# Runs "go test" with the arguments after the first, which is the file for its events. It prints the slowest tests, and
# how many passed. Those of the whole program use the one that the Makefile has built.
set -u
events=$1
shift
export STEELYARD_BINARY="$PWD/steelyard"
status=0
.cache/gotestsum --format pkgname --format-hide-empty-pkg --no-color --jsonfile "$events" -- -count 1 "$@" ||
	status=$?
printf '\nslowest:\n'
.cache/gotestsum tool slowest --num 10 --threshold 1s --jsonfile "$events"
.cache/testsum "$events" $status
