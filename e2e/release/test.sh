#!/bin/bash
# Tests "make release" for this architecture, as root: builds the last commit in two directories of different lengths,
# with different time zones and umasks, and compares all files; installs, upgrades and removes the packages. Both builds
# use Go's cache.
set -euo pipefail
cd "$(dirname "$0")/../.."
(cd e2e/release && go test -count 1 .)
work=$(mktemp -d "${TMPDIR:-/var/tmp}/steelyard-release.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
one=$work/one two="$work/another folder with a long name"
for clone in "$one" "$two"; do git -c safe.directory='*' clone -q "$PWD" "$clone"; done
arch=$(go env GOARCH)
make -C "$one" release VERSION=0.1.0 ARCH="$arch"
(umask 077 && TZ=Asia/Tokyo make -C "$two" release VERSION=0.1.0 ARCH="$arch")
diff "$one/dist/0.1.0/sha256sums" "$two/dist/0.1.0/sha256sums"
(cd "$two/dist/0.1.0" && sha256sum --check --quiet sha256sums)
make -C "$one" release VERSION=0.1.1 ARCH="$arch"
e2e/release/packages.sh "$one/dist/0.1.0" "$one/dist/0.1.1"
# CLUSTER=1: a cluster of kubelets runs the images, and upgrades without a lost request ("make controlplane" first).
[ -z "${CLUSTER:-}" ] || STEELYARD_RELEASES="$one/dist/0.1.0:$one/dist/0.1.1" \
	go test ./e2e/cluster -run '^TestDaemonSet$' -count 1 -timeout 20m
