#!/bin/bash
# Runs the tests of the file "tests" in the virtual machine. Their results go to the share of the host.
set -uo pipefail
mkdir -p /results
mount -t 9p -o trans=virtio,version=9p2000.L,cache=none results /results
export STEELYARD_BINARY=$binaries/steelyard
[ "$accel" = kvm ] || export STEELYARD_TIME_FACTOR=10
n=0
while read -r package limit tests only part; do
	case $package in '' | '#'*) continue ;; esac
	n=$((n + 1))
	[ "$only" = any ] || [ "$only" = "$flavour" ] || continue
	[ -z "$part" ] || [ "$part" = "$rows" ] || continue
	start=$SECONDS
	cd "$repository/$package" || exit 1
	"$binaries/$package.test" -test.v=test2json -test.timeout "$limit" -test.run "$tests" >/results/$n 2>&1 </dev/null
	status=$?
	echo $status >/results/$n.status
	echo "kernels: $package $tests: exit status $status after $((SECONDS - start)) s" >/dev/console
done <"$repository/e2e/kernels/tests"
