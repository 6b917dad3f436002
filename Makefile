# A pipe fails when any part of it does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Under sudo the Go of the user may not be in PATH.
export PATH := $(PATH):/usr/local/go/bin:/usr/lib/go/bin
# One static binary, the same from any directory.
export CGO_ENABLED = 0
# The version is linked in below; -buildvcs runs git again, which fails in a checkout that belongs to another user.
export GOFLAGS := $(GOFLAGS) -buildvcs=false

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
GOLANGCI_VERSION := v2.12.2

.PHONY: build help install demo unit race test test-tools test-kubernetes test-kernels test-all test-release try fresh
.PHONY: attack bfd conformance environments bench gobench fuzz mutants mutants-bpf lint generate bpf clean controlplane
.PHONY: conformance-programs deps root
.PHONY: pictures test-browser go-version release release-tool test-packages compile bpf-compiler

build: go-version ## build ./steelyard (the default)
	go build -ldflags '-s -w' -o steelyard .

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: build ## install the binary, a systemd unit and an example configuration (root)
	./steelyard install

demo: build ## run a network with balancers, servers and clients in namespaces (root)
	./steelyard demo

# Packages in which every test needs root. Tests of other packages skip with -short when they do.
NEED_ROOT := e2e e2e/cluster
unit: go-version ## run the tests that need neither root nor other programs
	@sh e2e/unit.sh $(NEED_ROOT)

# e2e/race.txt names the races of libraries that only tests provoke.
race: go-version ## run the tests of "make unit" under the race detector (needs a C compiler)
	sh e2e/deps.sh race
	@CGO_ENABLED=1 RACE=1 GORACE='suppressions=$(CURDIR)/e2e/race.txt' sh e2e/unit.sh $(NEED_ROOT)

# Packages are tested two at a time: many of them measure time on their own networks. "make lint" runs go vet.
test: root ## install what the tests need (apt), and run all but those on Kubernetes (root)
	@$(MAKE) -j 2 --no-print-directory deps compile
	@$(MAKE) --no-print-directory build test-tools
	@$(RUN_TESTS) .cache/test.json -p 2 -timeout 20m -vet=off -ldflags=-w -exec '$(CURDIR)/e2e/nice.sh' \
		$$(go list ./... | grep -v /e2e/cluster$$)

# Compiles the tests while apt installs. An error shows later: modules are downloaded only with apt's certificates.
compile: go-version
	@go list -export -deps -test ./... >/dev/null 2>&1 || :

test-kubernetes: root build test-tools controlplane conformance-programs ## run the tests on Kubernetes (root)
	sh e2e/deps.sh kubernetes
	@$(RUN_TESTS) .cache/test-kubernetes.json -timeout 40m ./e2e/cluster

test-all: ## test, test-kubernetes and test-kernels (root)
	$(MAKE) test
	$(MAKE) test-kubernetes
	$(MAKE) test-kernels

test-release: ## what takes hours, before a release: all tests of Kubernetes, mutants, long fuzzing, attacks (root)
	$(MAKE) test-all ROWS=all
	$(MAKE) test-packages CLUSTER=1
	$(MAKE) test-browser
	$(MAKE) conformance
	$(MAKE) environments
	$(MAKE) attack ATTACK_TIME=30m
	$(MAKE) bfd BFD_TIME=30m
	$(MAKE) fuzz FUZZTIME=10m
	$(MAKE) mutants N=60

PKG ?= ./lb
try: go-version ## test a change of one package, in under two minutes; PKG=./lb/kube
	@sh e2e/try.sh '$(PKG)'

test-browser: root build ## test the dashboard in a browser (root)
	sh e2e/deps.sh browser
	STEELYARD_BINARY='$(CURDIR)/steelyard' STEELYARD_CI=1 go test -tags browser ./e2e -run '^TestDashboard' -count 1

pictures: root build ## take pictures of the dashboard into dist/pictures, and that of the documents (root)
	sh e2e/deps.sh browser
	mkdir -p dist/pictures docs/pictures
	STEELYARD_BINARY='$(CURDIR)/steelyard' go test -tags browser ./e2e -run '^TestDashboard$$' -count 1 -timeout 20m \
		-pictures '$(CURDIR)/dist/pictures'
	cp dist/pictures/dashboard.png docs/pictures/

fresh: root ## run "make demo" and "make test" in a new minimal Debian (root); FRESH=deps only installs what they need
	sh e2e/deps.sh fresh
	e2e/fresh.sh $(FRESH)

# Runs "go test" with further arguments, writes its events to a file, and prints the slowest tests and the sums.
RUN_TESTS := e2e/test.sh
test-tools: go-version
	@go build -o .cache/gotestsum gotest.tools/gotestsum && go build -o .cache/testsum ./e2e/testsum

# Flavours of Debian's kernel, each in its own machine.
FLAVOURS ?= amd64 6.12-amd64
test-kernels: root test-tools ## run tests on Debian's kernels, in virtual machines (root); ROWS=all, FLAVOURS="amd64"
	sh e2e/deps.sh kernels
	@status=0; e2e/kernels/run.sh $(FLAVOURS) || status=$$?; \
	.cache/gotestsum --format pkgname --no-color --raw-command cat .cache/kernels/events.json || true; \
	.cache/testsum .cache/kernels/events.json $$status

ATTACK_TIME ?= 3m
attack: root build ## attack live connections in all ways at once (root); ATTACK_TIME=30m
	STEELYARD_BINARY='$(CURDIR)/steelyard' ATTACK_TIME='$(ATTACK_TIME)' go test ./e2e -run '^TestAttack$$' -v -count 1 -timeout 24h

BFD_TIME ?= 10m
bfd: root ## keep BFD sessions for ten minutes with all processors busy, and count false alarms (root); BFD_TIME=1h
	BFD_TIME='$(BFD_TIME)' go test ./announce/bfd -run '^TestNoFalseAlarm$$' -v -count 1 -timeout 24h

FLANNEL := .cache/flannel/flannel
# CONFORMANCE=REGEXP selects tests; CONFORMANCE_WITHOUT_AGENT=1 runs them with kube-proxy alone,
# PROXY=replace without kube-proxy.
CONFORMANCE ?= \[sig-network\] (LoadBalancers|Services|Networking Granular|Conntrack|Traffic Distribution)
conformance: root build controlplane conformance-programs ## run Kubernetes' tests of Services, half an hour (root)
	sh e2e/deps.sh kubernetes
	CONFORMANCE='$(CONFORMANCE)' CONFORMANCE_PROXY='$(PROXY)' STEELYARD_BINARY='$(CURDIR)/steelyard' \
		go test ./e2e/cluster -run '^TestUpstream$$' -v -count 1 -timeout 6h

# ENVIRONMENTS=REGEXP selects some, such as iptables/flannel.
environments: root build controlplane conformance-programs $(FLANNEL) ## test the rows of docs/environments.md, half an hour (root)
	sh e2e/deps.sh kubernetes
	STEELYARD_BINARY='$(CURDIR)/steelyard' \
		go test -tags environments ./e2e/cluster -run '^TestEnvironments$$/$(ENVIRONMENTS)' -v -count 1 -timeout 3h

BENCH_PARTS := cost,live,connections,scale,convergence
BENCH ?= $(BENCH_PARTS)
# The part "cluster" takes half an hour: BENCH=cluster.
bench: root build controlplane ## measure beside peers for about 15 minutes (root); BENCH=cost,live,... chooses parts
	sh e2e/deps.sh bench
	@mkdir -p .cache
	go run ./e2e/bench -only '$(BENCH)' -json .cache/bench.json $(if $(filter $(BENCH_PARTS),$(BENCH)),-page .cache/measurements.md)

GOBENCH ?= .
gobench: go-version ## run the benchmarks of Go; GOBENCH=REGEXP chooses (those of datapath need root)
	go test -run '^$$' -bench '$(GOBENCH)' -benchmem $(sort $(dir $(shell grep -rl --include='*_test.go' '^func Benchmark' ./*/)))

FUZZTIME ?= 30s
fuzz: go-version ## fuzz each parser; FUZZTIME=30s is the time for each
	@sh e2e/fuzz.sh '$(FUZZTIME)'

PKGS ?= ./lb $(addprefix ./lb/,admin/... agent/... cli/... file/... httplimit/... kube/... logqueue/... printable/... \
	state/...) ./healthd ./config ./announce/... ./systemd
N ?= 60
mutants: go-version ## change single tokens and list the changes that the unit tests miss; PKGS="..." N=60 SEED=...
	go run ./e2e/mutants -n $(N) $(if $(SEED),-seed $(SEED)) $(PKGS)

# Against rows, model, malformed frames and figures; N=100 takes hours.
mutants-bpf: root bpf-compiler ## change single tokens of the BPF programs, as "make mutants" (root); N=60 SEED=...
	go run ./e2e/mutants -n $(N) $(if $(SEED),-seed $(SEED)) -bpf datapath/bpf/steelyard.bpf.c \
		-object datapath/internal/bpf/sy_bpfel.o -run '^Test(Rows|Model|MalformedFrames|RandomFrames|FiguresOf.*)$$' ./datapath

# golangci-lint runs go vet, staticcheck and others, listed in .golangci.yml. Its first build takes minutes.
GOLANGCI := .cache/tools/golangci-lint-$(GOLANGCI_VERSION)
$(GOLANGCI):
	GOBIN='$(CURDIR)/.cache/tools' go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv .cache/tools/golangci-lint $@

lint: go-version $(GOLANGCI) ## check formatting, the linters of .golangci.yml, lengths of lines, and the alerting rules
	@test -z "$$(gofmt -l .)" || { echo "gofmt would change:"; gofmt -l .; exit 1; }
	GOLANGCI_LINT_CACHE='$(CURDIR)/.cache/golangci' $(GOLANGCI) run ./...
	go run ./e2e/lengths
	cd e2e/alerts && go vet . && go test .

generate: go-version bpf-compiler ## compile the BPF programs (clang-14) and write the generated documents
	go generate ./datapath ./datapath/inside ./e2e/bench/packets
	go test ./datapath ./docs -run Documented -update

bpf-compiler:
	sh e2e/deps.sh bpf

bpf: root generate ## compile the BPF programs and run their main tests: rows, model, malformed frames (root)
	go test ./datapath -timeout 20m -count 1 \
		-run '^Test(Rows|EveryReasonHasARow|Model|MalformedFrames|RandomFrames|StackHasRoom|ExecutedWork|VerifierBudget)$$'

# VERSION=0.1.0 where the commit has no tag; ARCH=amd64 alone; IMAGE=NAME of the image; KEY=FILE, a key of minisign.
ARCH ?= amd64,arm64
IMAGE ?= $(or $(PUSH),steelyard-lb/steelyard)
release: release-tool ## build the files of a release into dist/VERSION, from a commit; PUSH=REGISTRY/NAME pushes the image
	.cache/release -version '$(VERSION)' -arch '$(ARCH)' -image '$(IMAGE)' -key '$(KEY)' -push '$(PUSH)'

test-packages: root ## test "make release" and its packages, in a minimal Debian (root)
	sh e2e/deps.sh fresh
	e2e/release/test.sh

release-tool: go-version
	cd e2e/release && go build -trimpath -o '$(CURDIR)/.cache/release' .

clean: ## remove what was built
	rm -rf steelyard .cache dist

root: go-version
	@test "$$(id -u)" = 0 || { echo "the tests make network namespaces and load BPF: sudo make test" >&2; exit 1; }

deps: go-version
	sh e2e/deps.sh

# The Kubernetes programs that some tests run; the first build takes about six minutes.
CONTROLPLANE := .cache/controlplane
CONTROLPLANE_LDFLAGS := -s -w -X k8s.io/component-base/version.gitVersion=v1.35.4 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=35
controlplane: $(CONTROLPLANE)/built
$(CONTROLPLANE)/built: e2e/controlplane/go.sum
	cd e2e/controlplane && go build -ldflags '$(CONTROLPLANE_LDFLAGS)' -o $(CURDIR)/$(CONTROLPLANE)/ ./cmd/...
	touch $@

# The tests of Kubernetes, and the programs that they use.
UPSTREAM := .cache/conformance
conformance-programs: $(UPSTREAM)/built
$(UPSTREAM)/built: e2e/conformance/go.mod e2e/conformance/e2e_test.go
	cd e2e/conformance && go test -c -ldflags '$(CONTROLPLANE_LDFLAGS)' -o $(CURDIR)/$(UPSTREAM)/e2e.test .
	cd e2e/conformance && go build -ldflags '$(CONTROLPLANE_LDFLAGS)' -o $(CURDIR)/$(UPSTREAM)/ tool
	touch $@

$(FLANNEL): e2e/flannel/go.sum e2e/flannel/main.go
	cd e2e/flannel && go build -ldflags '-s -w' -o $(CURDIR)/$@ .

# An older go command with GOTOOLCHAIN=auto may have switched to the version in go.mod, and then reports that one.
# Before GNU make 4.4, $(shell) does not have the PATH that is exported above.
GO_NEEDED = $(shell sed -n 's/^go //p' go.mod)
GO_PATH = $(shell PATH='$(PATH)'; command -v go)
GO_FOUND = $(shell PATH='$(PATH)'; (go version || GOTOOLCHAIN=local go version) 2>/dev/null | \
	sed -n 's/^go version \(go[0-9.]*\).*/\1/p')
go-version:
	@$(if $(shell printf 'go%s\n' '$(GO_NEEDED)' | cat - <(echo '$(GO_FOUND)') | sort -V -C && echo yes),,\
		$(error Go $(GO_NEEDED) or newer is needed (https://go.dev/dl), and $(if \
			$(GO_FOUND),$(GO_PATH) is $(GO_FOUND),there is none in PATH or /usr/local/go/bin)))
