"""PEFT adapters with random weights, as folders and as PEFT's own models, for the tests of served LoRA."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

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
