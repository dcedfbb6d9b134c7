"""PEFT adapters with random weights, as folders and as PEFT's own models, for the tests of served LoRA."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hfaccel.lora.adapters import read_adapter
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime.runner import Runner

QV = ["q_proj", "v_proj"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def adapter(model, path: Path, *, seed: int = 0, r: int = 4, targets=QV, **settings) -> PeftModel:
    """Saves a random adapter as a folder; returns PEFT's model with it, over a copy of `model`."""
    config = LoraConfig(r=r, target_modules=targets, **{"lora_alpha": 8, **settings})
    peft = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    peft.save_pretrained(path)
    return peft.eval()


@torch.no_grad()
def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    """[T, vocab] of one row of ids."""
    return model(ids[None]).logits[0]


def mixed_adapters(model, at: Path) -> list[PeftModel]:
    """CASES L5 and L3, in folders a, b, c. A: rank 4, q and v; B: rank 16, all linears, rank-stabilized; C:
    rank 8, the MLP, with patterns."""
    ranks, alphas = {"up_proj": 1}, {"layers.0.mlp.down_proj": 3, "gate_proj": 0}
    return [
        adapter(model, at / "a", seed=1, targets=QV),
        adapter(model, at / "b", seed=2, r=16, targets=LINEARS, use_rslora=True),
        adapter(model, at / "c", seed=3, r=8, targets=MLP, rank_pattern=ranks, alpha_pattern=alphas),
    ]


def one_step(model, executor, rows, adapters, *, asked=None, hidden=False, page_tokens=16):
    """What one packed step says of every token, row by row, or of the tokens `asked`."""
    runner = Runner(model, page_tokens=page_tokens)
    runner.executor = executor
    counts = [len(row) for row in rows]
    positions = torch.cat([torch.arange(count) for count in counts])
    sequences = [runner.sequence() for _ in rows]
    picked = torch.arange(sum(counts)) if asked is None else torch.tensor(asked)
    try:
        how = {"hidden": hidden, "adapters": adapters}
        out = runner.step(torch.cat(rows), positions, sequences, counts, picked, **how)
    finally:
        for sequence in sequences:
            sequence.free()
    return out.split(counts) if asked is None else out


def slots_of(model, *folders, count=4):
    """Slots with each folder loaded in turn, and where each lies."""
    slots = AdapterSlots(model, slots=count)
    adapters = [read_adapter(str(n), path, model) for n, path in enumerate(folders)]
    for one in adapters:
        slots.make_room(one)
    for one in adapters:
        assert slots.acquire(one)
    return slots, [slots.slot(one) for one in adapters]
