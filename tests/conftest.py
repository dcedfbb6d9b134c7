"""What every test shares: no network, a fixed seed, one thread."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HFACCEL_MEASURE", "0")  # which executor serves a model is a matter of test_choice.py

import pytest
import torch
import transformers
from hypothesis import settings

# Tiny models: a second thread costs more than it brings, and pytest-xdist's workers share the cores. Tests of
# threading set the number they need and put it back.
torch.set_num_threads(1)

# The same examples in every run, and no deadline: how long one takes depends on the machine.
settings.register_profile("hfaccel", derandomize=True, deadline=None)
settings.load_profile("hfaccel")

# Files that stand on transformers itself: run against the oldest supported one too (`make test-oldest`).
TESTS = Path(__file__).parent
OLDEST = """
    cache/test_paged generate/test_checks generate/test_ends generate/test_gate generate/test_loop
    generate/test_masks generate/test_mixin generate/test_sampling lora/test_packed quant/test_head
    runtime/test_choice runtime/test_graphs runtime/test_native runtime/test_native_runs runtime/test_runner
    test_anatomy test_checkpoint test_classes test_compile test_encoders test_families test_journal
    test_loading test_patch test_peft test_registration test_report test_saving test_sites test_state
    test_swap test_trainer
""".split()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.relative_to(TESTS).with_suffix("").as_posix() in OLDEST:
            item.add_marker("oldest")


def pytest_report_header():
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@pytest.fixture(autouse=True)
def _seed():
    """Random weights and inputs repeat, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def spill(tmp_path, monkeypatch):
    """A folder of its own for the originals of models that come from no checkpoint."""
    folder = tmp_path / "spill"
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(folder))
    return folder


@pytest.fixture
def saved(tmp_path):
    """A folder with a tiny Llama."""
    from tiny import tiny

    folder = tmp_path / "saved"
    tiny("TL", num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder with another tiny Llama and its tokenizer."""
    from test_readme import _tokenizer
    from tiny import tiny

    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    _tokenizer(model.config.vocab_size).save_pretrained(tmp_path / "model")
    return tmp_path / "model"
