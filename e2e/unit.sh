#!/bin/sh
# make unit: the tests that need neither root nor other programs. Arguments: packages to leave out, below this module.
# make race: the same with the race detector, RACE=1.
set -u
# Three packages at a time: one of them waits for BGP timers most of the time.
unset STEELYARD_CI # a test that needs root is skipped, not failed
module=$(go list -m) || exit 1
all=$(go list ./...) || exit 1
for left in "$@"; do all=$(printf '%s\n' "$all" | grep -vx "$module/$left"); done
# .cache may belong to root, after sudo make test.
events=$(mktemp) || exit 1
trap 'rm -f "$events"' EXIT
trap 'exit 1' HUP INT TERM

status=0
# shellcheck disable=SC2086
go tool gotestsum --format pkgname --format-hide-empty-pkg --no-color --hide-summary skipped \
	--jsonfile "$events" -- -short -vet=off ${RACE:+-race} -p 3 $all || status=$?

printf '\nleft out, because it needs root or other programs (sudo make test):\n'
for left in "$@"; do
	[ ! -d "$left" ] || printf '%6d tests of %s\n' "$(cat "$left"/*_test.go | grep -c '^func Test')" "$left"
done
sed -n "s,.*\"Action\":\"skip\"\,\"Package\":\"$module/\([^\"]*\)\"\,\"Test\":.*,\1,p" "$events" | sort | uniq -c |
	while read -r n package; do printf '%6d tests of %s\n' "$n" "$package"; done
go run ./e2e/testsum "$events" $status
