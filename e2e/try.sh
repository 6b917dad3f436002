#!/bin/sh
# make try: what a change of one package (1) needs first, in under two minutes. As root it runs all tests of the package,
# except of the datapath, whose programs "make bpf" tests. It names what it runs, and what it leaves to "make test".
set -u
package=$(go list "$1") || exit 1
export STEELYARD_BINARY="$PWD/steelyard"
own=-short
[ "$(id -u)" != 0 ] || case $package in */datapath | */e2e | */e2e/cluster) ;; *) own= ;; esac
users=$(go list -f '{{.ImportPath}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}}' ./... |
	awk -v package="$package" '{ for (i = 2; i <= NF; i++) if ($i == package && $1 != package) { print $1; break } }' |
	grep -vE '/e2e(/cluster)?$')
status=0
echo "go vet and all tests${own:+ without root} of $package"
go vet "$package" && go test $own -timeout 3m "$package" || status=1
if [ -n "$users" ]; then
	printf 'tests without root of what imports it:\n%s\n' "$users"
	# shellcheck disable=SC2086
	go test -short -vet=off $users || status=1
fi
echo 'left to "make test": tests with root of other packages, and the whole program (e2e)'
exit $status
