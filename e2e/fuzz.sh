#!/bin/sh
# Fuzzes each parser for a time (1), in one binary for each package. Inputs that fail are below testdata/fuzz of their
# package; what is interesting is kept in .cache/fuzz. By itself Go would minimize each interesting input for up to a
# minute, in which it finds nothing. "go test -fuzz" would also compile all dependencies again to see what inputs cover
# in them; this covers our own packages.
set -eu
time=$1
module=$(go list -m)
cache=$PWD/.cache/fuzz
log=$cache/log
mkdir -p "$cache"
fuzz() { # NAME PACKAGE BINARY
	echo "$1 in $2"
	{
		(cd "$2" && "$3" -test.run '^$' -test.fuzz "^$1\$" -test.fuzztime "$time" -test.fuzzminimizetime 1s \
			-test.fuzzcachedir "$cache/$2" </dev/null) && echo 0 >"$cache/status" || echo 1 >"$cache/status"
	} 2>&1 | tee "$log"
	[ "$(cat "$cache/status")" != 0 ] || return 0
	# Before Go 1.27, the end of the time may fail a target, without an input (golang.org/issue/75804).
	grep -q '^    context deadline exceeded$' "$log" && ! grep -q 'Failing input' "$log" || return 1
	echo "$1: the end of the time was reported as a failure (golang.org/issue/75804); no input has failed"
}
grep -rlE --include='*_test.go' '^func Fuzz' ./*/ | xargs -n 1 dirname | sort -u | while read -r package; do
	binary=$cache/$(echo "$package" | tr / _).test
	go test -c -gcflags="$module/...=-d=libfuzzer" -o "$binary" "$package"
	for name in $(grep -hoE '^func Fuzz[A-Za-z0-9]+' "$package"/*_test.go | sed 's/func //'); do
		fuzz "$name" "$package" "$binary"
	done
done
