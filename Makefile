# Everything a newcomer needs: make demo, make test. The rest is for working on it.
# What each target needs from outside is pinned and kept in the cache by scripts/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

MODULE := github.com/dormouse-run/dormouse
# Each folder of a command gives bin/<its name>.
COMMANDS := $(patsubst %/,%,$(sort $(dir $(wildcard agentd/cmd/*/*.go coordinator/cmd/*/*.go test/cmd/*/*.go))))

VERSION = $(shell git describe --always --tags --dirty 2>/dev/null || echo dev)
COMMIT = $(shell git rev-parse HEAD 2>/dev/null)
LDFLAGS = -s -w -X $(MODULE)/pkg/version.Version=$(VERSION) -X $(MODULE)/pkg/version.Commit=$(COMMIT)
GOBUILD = CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'

# The packages whose tests start sandboxes or whole stacks; they have the machine
# to themselves. The rest runs side by side.
HEAVY := /test/|/runtime/runsc|/guest$$|/layers|/agentd/app$$
# The packages in which goroutines meet: what runs under the race detector.
RACE := /pkg/|/coordinator/|/agentd/internal/(guestwire|nodestate|runner|runtime/fake)$$
TEST_TIMEOUT ?= 20m
TESTFLAGS ?=
# Tests that wait for a true minute, and do next to nothing meanwhile: they wait while the others run.
MINUTE := AMinute$$
# One heavy package runs at a time, while the next one is compiled.
ALONE = -p 2 -exec 'flock -o $(CURDIR)/bin/heavy.lock'

DEMO_DIR ?= /var/lib/dormouse-dev/demo

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z0-9%-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# ---- set-up -------------------------------------------------------------------

.PHONY: tools tools-test tools-dev images images-test
tools: ## install the pinned real components (runsc, containerd, Redis ...)
	@scripts/tools.sh demo
tools-test: # and the servers that only tests use
	@scripts/tools.sh demo test
tools-dev: ## and what only tests and developers need (other servers, buf, linters)
	@scripts/tools.sh all
images: tools ## build the images that demo and tests use
	@scripts/images.sh
images-test: tools # what only tests use
	@scripts/images.sh programs

.PHONY: build bundle
build: ## compile every command into bin/
	@mkdir -p bin
	@$(GOBUILD) -o bin/ $(addprefix ./,$(COMMANDS))
bundle: tools ## make the runtime bundle (runsc + guest init) in bin/bundle
	@digest=$$(scripts/bundle.sh bin/bundle) && echo "[bundle] $$digest"

# ---- running it ---------------------------------------------------------------

.PHONY: demo down env
demo: tools images build bundle ## show the main job on real parts; KEEP=1 leaves it up
	@bin/demo --dir $(DEMO_DIR) $(if $(KEEP),--keep)
env: ## the environment of a demo that was left up, for eval
	@cat $(DEMO_DIR)/env 2>/dev/null || { echo "no demo is up: make demo KEEP=1" >&2; exit 1; }
down: ## end a demo that was left up
	@mkdir -p bin
	@$(GOBUILD) -o bin/ ./test/cmd/devstack
	@bin/devstack down --dir $(DEMO_DIR)

# ---- checks -------------------------------------------------------------------

.PHONY: test race crash-matrix robustness soak load-smoke load-1024 load-node load-fleet fault-run lint gen gen-check
SOAK ?= 10m
SOAKFLAGS ?=
LOADFLAGS ?=
FAULTFLAGS ?=
test: tools-test images images-test build bundle ## every test, on real parts
	@status=0; \
	CGO_ENABLED=0 go -C build/runsc test -trimpath -vet=off . || status=1; \
	go test -run '$(MINUTE)' -timeout $(TEST_TIMEOUT) ./coordinator/app & minute=$$!; \
	go test -skip '$(MINUTE)' -timeout $(TEST_TIMEOUT) $(TESTFLAGS) $$(go list ./... | grep -vE '$(HEAVY)') || status=1; \
	wait $$minute || status=1; \
	go test $(ALONE) -timeout $(TEST_TIMEOUT) $(TESTFLAGS) $$(go list ./... | grep -E '$(HEAVY)') || status=1; \
	exit $$status
race: tools-test ## the race detector, on the packages that are concurrent and need no sandbox
	@go test -race -timeout $(TEST_TIMEOUT) $$(go list ./... | grep -E '$(RACE)')
crash-matrix: tools images ## kill the daemons at every fault point, and a thousand interleavings
	@scripts/crash-matrix.sh
robustness: tools ## clients, faults and a checker: SEEDS (20), or DURATION of new ones, or one SEED; OUT gets the reports
	@SEEDS=$(SEEDS) DURATION=$(DURATION) SEED=$(SEED) OUT=$(abspath $(OUT)) go test ./test/robustness -run '^TestC30' -count=1 -v -timeout 0
soak: tools images build bundle ## thirty sandboxes, everything at random, daemons killed, for SOAK (10m)
	@bin/soak --duration $(SOAK) $(SOAKFLAGS)
load-smoke: tools images build bundle ## 48 sandboxes checkpointed and restored at once, twice
	@bin/dormouse-load run $(LOADFLAGS) smoke
load-1024: tools images build bundle ## 1,024 of them on this machine, beside bare runsc (L01)
	@bin/dormouse-load run $(LOADFLAGS) load-1024
load-node: tools images build bundle ## 79 with 64 MiB of heap and a file of 32 MiB (L02)
	@bin/dormouse-load run $(LOADFLAGS) node
load-fleet: tools images build ## 1,024 on thirteen simulated nodes, to load the coordinator and Redis (L03)
	@bin/dormouse-load run $(LOADFLAGS) fleet
fault-run: tools images build bundle ## what goes wrong in a cluster's life, with 16 sandboxes on three nodes (F01 to F12)
	@bin/faultrun $(FAULTFLAGS)
lint: tools-dev ## golangci-lint
	@"$$(scripts/tools.sh --bin)/golangci-lint" run --allow-parallel-runners ./...
gen: tools-dev ## generate code and OpenAPI from the protos
	@scripts/gen.sh
gen-check: tools-dev ## is what is committed what the protos give, and compatible?
	@scripts/gen.sh check

# ---- figures ------------------------------------------------------------------

# Each in a cluster of its own, against bare runsc in the same run; a missed target
# is a line of the report, not a failure. SCALE=0.2 is a quick look.
BENCHES := start checkpoint restore memory image catalog deletion exec files lifecycle network warm load-node load-fleet
SCALE ?= 1
BENCHFLAGS ?=
ROUNDS ?= 3

.PHONY: bench bench-compare $(BENCHES:%=bench-%)
bench: $(BENCHES:%=bench-%) ## every figure, or BENCHES, into bench/RESULTS.md
bench-compare: tools images build bundle ## this checkout and the commit REF in turn, ROUNDS (3) times; BENCHES="start restore"
	@bin/bench compare --ref "$${REF:?give REF, the commit to compare with}" --rounds $(ROUNDS) --scale $(SCALE) $(BENCHES)
$(BENCHES:%=bench-%): bench-%: tools images build bundle
	@bin/bench --out bench --scale $(SCALE) $(BENCHFLAGS) $*

.PHONY: fuzz fuzz-short
FUZZTIME ?= 2m
fuzz: ## every fuzz target, FUZZTIME each (2m)
	@scripts/fuzz.sh $(FUZZTIME)
fuzz-short: ## every fuzz target for a few hundred inputs
	@scripts/fuzz.sh 300x

.PHONY: clean
clean: ## remove bin/; the cache stays
	@rm -rf bin
