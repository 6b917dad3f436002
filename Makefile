# sudo make demo    build, and see a whole network on this machine
# sudo make test    install what the tests need (apt), and run everything
#
# A pipe fails when any part of it does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Under sudo the Go of the user may not be in PATH.
export PATH := $(PATH):/usr/local/go/bin:/usr/lib/go/bin
# One static binary, the same from any directory.
export CGO_ENABLED = 0
# The version is linked in below; asking git again fails in a checkout that belongs to somebody else.
export GOFLAGS := $(GOFLAGS) -buildvcs=false

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X github.com/steelyard-lb/steelyard/lb/cli.version=$(VERSION)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.7.0

.PHONY: build demo test controlplane deps generate lint install clean

build:
	go build -trimpath -ldflags '$(LDFLAGS)' -o steelyard .

demo: build
	./steelyard demo

# Packages are tested two at a time: many of them measure time on their own networks. The summary is built, not "go run",
# so that its last line is the last.
test: deps build controlplane
	@test "$$(id -u)" = 0 || { echo "the tests make network namespaces and load BPF: sudo make test" >&2; exit 1; }
	go build -o .cache/testsum ./e2e/testsum
	go test -json -p 2 -count 1 -timeout 20m ./... | .cache/testsum

deps:
	sh e2e/deps.sh

# Kubernetes' own programs, which some tests run: about six minutes, once.
CONTROLPLANE := .cache/controlplane
CONTROLPLANE_LDFLAGS := -s -w -X k8s.io/component-base/version.gitVersion=v1.35.4 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=35
controlplane: $(CONTROLPLANE)/built
$(CONTROLPLANE)/built: e2e/controlplane/go.sum
	cd e2e/controlplane && go build -trimpath -ldflags '$(CONTROLPLANE_LDFLAGS)' -o $(CURDIR)/$(CONTROLPLANE)/ ./cmd/...
	touch $@

generate:
	go generate ./datapath

lint:
	@test -z "$$(gofmt -l .)" || { echo "gofmt would change:"; gofmt -l .; exit 1; }
	go vet ./...
	go run $(STATICCHECK) ./...

install: build
	./steelyard install

clean:
	rm -rf steelyard .cache
