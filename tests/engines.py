"""What the tests of the engine share: tiny patched models, answers of `generate`, and pages counted."""

import random

import pytest
import torch

from hfaccel.generate import mixin
from hfaccel_kernels import native
from plans import quantize
from tiny import ids, tiny

exact = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")


def patched(family="llama", *, layout=None, dtype=torch.float32, kv_bits=None):
    model = tiny(family)
    if layout is not None:
        quantize(model, layout)
    model.to(dtype)
    mixin.install(model, kv_bits=kv_bits, page_tokens=4)
    return model


def solo(model, prompt, new, **kwargs):
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0} | kwargs
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def prompt_of(length, seed=0):
    return ids(1, length, seed=seed)[0].tolist()


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    engine.drain()
    return requests


def mixed(model, count=9, seed=0):
    """Prompts of many lengths, half of them with a common beginning, and their own answers."""
    draw, head = random.Random(seed), prompt_of(13, 99)
    asked = []
    for n in range(count):
        prompt = (head if n % 2 else []) + prompt_of(draw.randrange(1, 24), n)
        new = draw.choice((1, 8, 19, 29))
        asked.append((prompt, new, solo(model, prompt, new)))
    return asked


def check_pages_are_back(engine):
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["swapped_bytes"] == 0
    assert stats["used_pages"] == stats["cached_pages"]
    if engine.tree is not None:
        assert engine.tree.evictable == len(engine.tree)
        engine.tree.clear()
    assert engine.pool.used_pages == 0 and not any(engine.pool.references)
