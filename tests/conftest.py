"""What every test shares: no network, a fixed seed, one thread."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from hypothesis import settings

# Tiny models: a second thread costs more than it brings, and the workers of pytest-xdist share the cores. Tests of
# threading set the number they need and put it back.
torch.set_num_threads(1)


def pytest_report_header():
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@pytest.fixture(autouse=True)
def _seed():
    """Random weights and inputs repeat, whatever ran before."""
    torch.manual_seed(0)
