"""What every test shares: no network, a fixed seed, torch on the machine's cores."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from hypothesis import settings

torch.set_num_threads(
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)

# The same examples in every run, and no deadline: how long one takes depends on the machine.
settings.register_profile("hfaccel", derandomize=True, deadline=None)
settings.load_profile("hfaccel")


def pytest_report_header():
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {threads} threads"


@pytest.fixture(autouse=True)
def _seed():
    """Random weights and inputs repeat, whatever ran before."""
    torch.manual_seed(0)
