"""What every test shares: no network, a fixed seed, torch on the machine's cores."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

torch.set_num_threads(
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)


def pytest_report_header():
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {threads} threads"


@pytest.fixture(autouse=True)
def _seed():
    """Random weights and inputs repeat, whatever ran before."""
    torch.manual_seed(0)
