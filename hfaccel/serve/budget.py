"""How much memory is left for keys and values, and how many pages and requests that is.

    memory x utilization = weights + adapters + activations + overhead + KV

`Budget` is the arithmetic alone. `budget_of` fills it in for a model on its device: weights as they are
stored, the KV bytes of a token from the pages that a one-token step makes, activations from the widest
tensors of a step of `token_budget` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hfaccel.errors import PatchError
from hfaccel.report import model_bytes
from hfaccel.runtime.runner import Runner

OVERHEAD_BYTES = {"cuda": 1 << 30}  # context, workspaces, captured graphs
OVERHEAD_HOST_BYTES = 512 << 20  # interpreter and libraries
LIVE_WIDTHS = 2  # of the widest matrix product, input and output are alive at once


@dataclass(frozen=True)
class Budget:
    """What a device's memory is divided into.

    Args:
        memory_bytes: of the device. utilization: the share of it that may be used, above 0, at most 1.
        kv_bytes_per_token: keys and values of one token over all layers. adapter_bytes: of their slots.
    Raises: PatchError if weights, activations and overhead leave nothing.
    """

    memory_bytes: int
    utilization: float
    weights_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int = 0
    overhead_bytes: int = 0
    adapter_bytes: int = 0

    def __post_init__(self):
        if not 0 < self.utilization <= 1:
            raise PatchError(f"memory_utilization is a share above 0, at most 1, not {self.utilization!r}")
        if self.kv_bytes_per_token < 1:
            raise PatchError(f"a token takes at least one byte of KV, not {self.kv_bytes_per_token}")
        if self.kv_bytes < self.kv_bytes_per_token:
            raise PatchError(
                f"nothing is left for keys and values: {self.utilization:.0%} of {gb(self.memory_bytes)} "
                f"less {gb(self.weights_bytes)} of weights, {gb(self.adapter_bytes)} of adapters, "
                f"{gb(self.activation_bytes)} of activations and {gb(self.overhead_bytes)} of overhead"
            )

    @property
    def kv_bytes(self) -> int:
        usable = int(self.memory_bytes * self.utilization)
        spent = self.weights_bytes + self.adapter_bytes + self.activation_bytes + self.overhead_bytes
        return usable - spent

    @property
    def tokens(self) -> int:
        return self.kv_bytes // self.kv_bytes_per_token

    def pages(self, page_tokens: int) -> int:
        """Whole pages that fit."""
        return self.tokens // page_tokens

    def requests(self, tokens: int) -> float:
        """How many requests of so many tokens each, prompt and answer, fit at once."""
        return self.kv_bytes / (self.kv_bytes_per_token * tokens)


def gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def kv_bytes_per_token(layers: int, kv_heads: int, head_size: int, bits: int = 16) -> int:
    """Keys and values of one token; with 8 bits each head has a 4-byte scale beside its codes."""
    head_bytes = head_size * bits // 8 + (4 if bits == 8 else 0)
    return 2 * layers * kv_heads * head_bytes


def activation_bytes(model: nn.Module, token_budget: int, rows: int) -> int:
    """A step's tensors at their largest, fp32: the residual stream, its widest matrix product, and the logits
    of `rows` rows in the model's dtype and in fp32."""
    config = model.config.get_text_config(decoder=True)
    widest = max(
        (max(p.shape[-2:]) for n, p in model.named_parameters() if p.dim() > 1 and ".layers." in f".{n}"),
        default=4 * config.hidden_size,
    )
    head = model.get_output_embeddings()
    vocab = getattr(head, "out_features", None) or config.vocab_size
    per_token = 4 * (2 * config.hidden_size + LIVE_WIDTHS * widest)
    return token_budget * per_token + rows * vocab * (4 + model.dtype.itemsize)


def measured_kv_bytes_per_token(model: nn.Module, kv_bits: int | None, barred=None) -> int:
    """From the pages themselves: one token is run through the model."""
    runner = Runner(model, kv_bits=kv_bits, page_tokens=1, budget_pages=1, barred=barred)
    sequence = runner.sequence()
    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    runner.step(zero, zero, [sequence], [1], zero)
    return runner.pool.bytes_per_token()


def memory_of(model: nn.Module) -> int:
    """Bytes of the model's device that the model could have for itself: what is free, and its own weights."""
    return free_bytes(model.device) + model_bytes(model)


def free_bytes(device: torch.device) -> int:
    """What is free of a device's memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()


def available_host_bytes(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int:
    """Memory that this process can still get: the machine's, or its control group's where that is less.

    Raises: PatchError on a system that does not say.
    """
    found = []
    try:
        lines = Path(meminfo).read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    try:
        limit, used = (Path(cgroup, f"memory.{name}").read_text().strip() for name in ("max", "current"))
        if limit != "max":
            found.append(max(0, int(limit) - int(used)))
    except OSError:
        pass
    if not found:
        raise PatchError("this system does not say how much memory is free: give memory_bytes or pages")
    return min(found)


def budget_of(
    model: nn.Module,
    *,
    kv_bits: int | None = None,
    utilization: float = 0.9,
    token_budget: int = 512,
    rows: int = 256,
    memory_bytes: int | None = None,
    overhead_bytes: int | None = None,
    barred: dict[str, str] | None = None,
    adapter_bytes: int = 0,
) -> Budget:
    """The budget of a model on the device where it is.

    Args:
        kv_bits, barred: as `Runner` takes them. token_budget, rows: tokens and asked rows of a step at most.
        memory_bytes: of the device, else what `memory_of` finds. overhead_bytes: else the device's usual.
        adapter_bytes: of their slots, as `AdapterSlots.bytes_for` says.
    """
    if memory_bytes is None:
        memory_bytes = memory_of(model)
    if overhead_bytes is None:
        overhead_bytes = OVERHEAD_BYTES.get(model.device.type, OVERHEAD_HOST_BYTES)
    return Budget(
        memory_bytes=memory_bytes,
        utilization=utilization,
        weights_bytes=model_bytes(model),
        kv_bytes_per_token=measured_kv_bytes_per_token(model, kv_bits, barred),
        activation_bytes=activation_bytes(model, token_budget, rows),
        overhead_bytes=overhead_bytes,
        adapter_bytes=adapter_bytes,
    )
