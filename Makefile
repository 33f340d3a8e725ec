# `make run` and `make test` work on a bare machine with Python 3.11+, pip and make.

PYTHON ?= python3
BIN := .venv/bin
# Two models by name, one of which reads English text, where that one has been fetched.
CONFIG ?= cluster/configs/with-own-text.yaml --fallback serve_config.yaml
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: install lint check test test-slow test-gpu test-mutants test-security test-clients test-console test-compliance test-faults test-faults-quick test-faults-nodes test-kills run stop bench bench-quick bench-fairness eval eval-quick eval-text table-1 manifests docs test-dashboard clean

# Where it is set, as in some images, every process and every worker of the tests compiles all sources anew.
unexport PYTHONDONTWRITEBYTECODE

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv; the first time this takes some minutes"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	@touch $@

lint: install        # repairs what can be repaired
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

check: install       # style, types, import contracts
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy && $(BIN)/lint-imports

# Tests of Ray need both cores of a small machine, one after the other. The others run side by side,
# four at once on any machine, as they wait for half of their time.
PYTEST := $(BIN)/python -m pytest
BESIDE := -n 4 --dist loadfile
define both
failed=; \
$(PYTEST) -m 'ray and not gpu and $(1)' || failed=1; \
$(PYTEST) $(BESIDE) -m 'not ray and not gpu and $(1)' || failed=1; \
test -z "$$failed"
endef

test: install        # includes a real application on a local Ray
	@$(call both,not slow)

test-slow: install   # broken engines, live changes, several nodes, every way of asking: also in CI
	@$(call both,slow)

test-gpu: install
	$(BIN)/python -m pytest -m gpu

test-security: install # the tests that docs/security.md names; five minutes
	$(BIN)/python -m tests.security

test-clients: install  # eleven unmodified clients against the shipped application; installs them the first time
	$(BIN)/python -m tests.clients

test-console: install  # eight minutes; the console in a headless Chromium, which this machine must have
	$(BIN)/python -m tests.console

test-compliance: install  # the suite of Open Responses: SUITE=a checkout of its repository, which the help names
	$(BIN)/python -m tests.compliance $(SUITE)

test-mutants: install  # a quarter of an hour; makes mistakes in copies, and says which no test notices
	$(BIN)/python -m tests.mutants

test-faults: install  # three quarters of an hour; breaks every kind of process under load; keeps the table
	$(BIN)/python -m tests.faults --out benchmarks/results/faults.md

test-faults-quick: install  # within five minutes; the faults that any change must survive
	$(BIN)/python -m tests.faults --quick

test-faults-nodes: install  # ten minutes, as root on Linux; several nodes in namespaces of their own
	$(BIN)/python -m tests.faults --nodes --out benchmarks/results/faults-nodes.md

test-kills: install  # a quarter of an hour, on Linux; kills everything twenty times while files are uploaded
	$(BIN)/python -m tests.faults.kills

run: install         # until Ctrl-C or `make stop`
	@$(BIN)/rapid serve $(CONFIG)

stop:                # ends what `make run` started, nothing else
	@test ! -x $(BIN)/rapid || $(BIN)/rapid stop

# Each script says what it measures and how long it takes, and keeps its results.
FULL := engine.cpu_attention decoding.decode engine.first_token serving.rounds engine.scheduling \
	serving.served_draft_length serving.load decoding.determinism serving.startup
QUICK := engine.cpu_attention decoding.decode engine.first_token engine.scheduling serving.rounds

bench: install       # about an hour on two cores that nobody else uses
	for script in $(FULL); do $(BIN)/python -m benchmarks.$$script || exit 1; done

bench-quick: install # five minutes; prints the tables and keeps nothing
	for script in $(QUICK); do $(BIN)/python -m benchmarks.$$script --quick || exit 1; done

bench-fairness: install  # twelve minutes; four tenants, equal or weighted, and three beside a heavy one
	$(BIN)/python -m benchmarks.serving.fairness

LAPTOP := laptop laptop-robustness laptop-dialogue

eval: install        # within an hour and a half on two cores; goes on where it was interrupted
	for task in $(LAPTOP); do $(BIN)/rapid eval --task $$task --reuse-prefill || exit 1; done
	$(BIN)/rapid eval --task laptop-speed --batch 1 --workers 1
	$(BIN)/python -m evaluation.reports.report $(LAPTOP:%=.eval/%) .eval/laptop-speed --out benchmarks/results/eval

eval-quick: install  # three minutes: every baseline on a few items
	rm -rf .eval/laptop-quick
	$(BIN)/rapid eval --task laptop-quick

TEXT := plain rag-target sd-self prompt-lookup rapid-self-boost rapid-self-adaptive

eval-text: install   # real text, with SmolLM2-135M drafting for itself; twenty minutes on two cores; resumes
	@$(BIN)/rapid models get smollm2-135m all-minilm-l6-v2
	$(BIN)/rapid eval --task real-text --target smollm2-135m $(TEXT:%=--system %)

# DRY=1 shows the plan; DATA=FOLDER has the official files; MORE="--recipe NAME --quantization int4 ..."
table-1: install     # the paper's Table 1: NODE=8xh100, or 2xcpu to rehearse; docs/table-1.md; resumes
	@$(BIN)/rapid eval --node "$(NODE)" $(if $(DRY),--dry-run) $(if $(DATA),--data "$(DATA)") $(MORE)

manifests: install   # of the shipped configurations, for Kubernetes
	$(BIN)/rapid manifests serve_config.yaml one-node
	$(BIN)/rapid manifests cluster/configs/one-gpu-self-speculation.yaml one-gpu
	$(BIN)/rapid manifests cluster/configs/llama-3.1-8b-with-70b-drafter.yaml llama-8b-with-70b

docs: install        # the pages as a site, in site/; installs MkDocs the first time
	@$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test-dashboard: install  # every query of the dashboard and the alerts, by a real Prometheus on loopback
	$(BIN)/python -m tests.dashboard

clean: stop
	rm -rf .venv build site *.egg-info .run
