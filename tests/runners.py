"""What the tests of the runner and of its executors share."""

import torch

from hfaccel.generate import mixin
from tiny import tiny


def running(family="TL", **kwargs):
    model = tiny(family)
    mixin.install(model, page_tokens=4, **kwargs)
    return model, mixin.runner_of(model)


def dense(model, row):
    with torch.no_grad():
        return model(row[None], use_cache=False).logits[0]
