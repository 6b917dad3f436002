#!/bin/sh
# Fuzzes each parser for a time (1), in one binary for each package. Inputs that fail are below testdata/fuzz of their
# package; what is interesting is kept in .cache/fuzz. By itself Go would minimize each interesting input for up to a
# minute, in which it finds nothing.
set -eu
time=$1
cache=$PWD/.cache/fuzz
mkdir -p "$cache"
grep -rlE --include='*_test.go' '^func Fuzz' ./*/ | xargs -n 1 dirname | sort -u | while read -r package; do
	binary=$cache/$(echo "$package" | tr / _).test
	go test -c -fuzz . -o "$binary" "$package"
	grep -hoE '^func Fuzz[A-Za-z0-9]+' "$package"/*_test.go | sed 's/func //' | while read -r name; do
		echo "$name in $package"
		(cd "$package" && "$binary" -test.run '^$' -test.fuzz "^$name\$" -test.fuzztime "$time" \
			-test.fuzzminimizetime 1s -test.fuzzcachedir "$cache/$package" </dev/null)
	done
done
