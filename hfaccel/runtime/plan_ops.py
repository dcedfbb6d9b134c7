"""The records of a plan: what each computes, reads and writes. Numbers (`code`) are those of csrc/plan.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hfaccel.runtime.plan import (
    ALL,
    ASKED,
    COLS,
    ITEMS,
    ROWS,
    TOKENS,
    Matrix,
    Op,
    View,
    acts_key,
    reads,
    updates,
    writes,
)
from hfaccel_kernels.layouts import ROWS as BLOCK_ROWS

_FP32 = (torch.float32,)
# position = the number in csrc/plan.h
ACTIVATIONS = ("none", "silu", "gelu_tanh", "gelu_erf", "relu", "quick_gelu", "relu2")


@dataclass(frozen=True, kw_only=True, eq=False)
class Embed(Op):
    """out = multiplier * table[id]  (+ positions[position + position_offset])"""

    code: ClassVar[int] = 1
    out: int = writes(ROWS)
    table: Matrix
    multiplier: float = 1.0
    positions: torch.Tensor | None = None  # [max_positions, width], learned
    position_offset: int = 0

    def matrices(self):
        return (self.table,)

    def check(self, plan):
        self.table.check()
        self.need(plan.buffers[self.out].width == self.table.k, "embedding width")
        if self.positions is not None:
            self.need(plan.max_positions > 0, "position table")
            rows = plan.max_positions + self.position_offset
            self.need_tensor(self.positions, (rows, self.table.k), "position table")

    def detail(self):
        learned = "" if self.positions is None else f" + positions {list(self.positions.shape)}"
        return f"[{self.table.n}, {self.table.k}] {self.table.format} x {self.multiplier:g}{learned}"

    def weight_bytes(self):
        return self.table.bytes // max(1, self.table.n)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rope(Op):
    """cos, sin = scaling * cos, sin(position * inv_freq), once a step for all layers of one kind"""

    code: ClassVar[int] = 2
    out: int = writes(ROWS)  # [2 * half]: cos, then sin
    inv_freq: torch.Tensor
    scaling: float = 1.0

    def check(self, plan):
        self.need_tensor(self.inv_freq, (plan.buffers[self.out].width // 2,), "inv_freq", _FP32)
        self.need(plan.buffers[self.out].width % 2 == 0, "rope width")

    def detail(self):
        return f"{self.inv_freq.numel()} frequencies, scaling {self.scaling:g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm(Op):
    """For each head of a view: x / sqrt(mean(x^2) + eps) * (w or 1 + w); or LayerNorm with w and b"""

    code: ClassVar[int] = 3
    x: View = reads(ROWS)
    out: int = writes(ROWS)  # [count * size]
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float
    centered: bool = False  # LayerNorm
    unit_offset: bool = False  # Gemma

    def check(self, plan):
        self.need_view(plan, self.x)
        self.need(plan.buffers[self.out].width == self.x.count * self.x.size, "norm width")
        for tensor in (self.weight, self.bias):
            self.need_tensor(tensor, (self.x.size,), "norm weight")

    def detail(self):
        kind = "layernorm" if self.centered else "rms 1+w" if self.unit_offset else "rms"
        return f"{self.x} {kind} eps {self.eps:g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Quant(Op):
    """Round rows to integers (activations.quantize_activations); the buffer says for which matrices"""

    code: ClassVar[int] = 4
    x: int = reads(ROWS)
    out: int = writes(ROWS)

    def check(self, plan):
        out = plan.buffers[self.out]
        self.need(out.kind == "acts" and out.acts is not None, "quantized buffer")
        self.need(plan.buffers[self.x].width == out.width == out.acts.k, "quantized width")

    def detail(self):
        return f"b{self.x} -> b{self.out}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Scale(Op):
    """out = x * scale, the inputs of matrices with an `input_scale`"""

    code: ClassVar[int] = 18
    x: int = reads(ROWS)
    out: int = writes(ROWS)
    scale: torch.Tensor

    def check(self, plan):
        x, out = plan.buffers[self.x], plan.buffers[self.out]
        self.need(x.width == out.width and x.rows == out.rows, "scaled width")
        self.need_tensor(self.scale, (x.width,), "scale", _FP32)

    def detail(self):
        return f"b{self.x} -> b{self.out}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Matmul(Op):
    """outs[i] = x @ parts[i].T + bias; x quantized where the parts are packed, else fp32"""

    code: ClassVar[int] = 5
    x: int = reads(ALL)
    outs: tuple[int, ...] = writes(COLS)
    parts: tuple[Matrix, ...]

    def matrices(self):
        return self.parts

    def check(self, plan):
        self.need(1 <= len(self.parts) <= 3 and len(self.outs) == len(self.parts), "1 to 3 parts")
        x, first = plan.buffers[self.x], self.parts[0]
        for out, part in zip(self.outs, self.parts, strict=True):
            part.check()
            self.need(plan.buffers[out].width == part.n, f"output width {part.n}")
            self.need(plan.buffers[out].rows == x.rows, "rows of the output")
            self.need(part.k == x.width, f"input width {part.k}")
            self.need(part.transposed == first.transposed and not (part.transposed and part.layout), "Conv1D")
            self.need(acts_key(part) == (acts_key(x.acts) if x.kind == "acts" else None), "activation chunks")

    def detail(self):
        return " ".join(
            f"[{p.n}, {p.k}] {p.format}{' +bias' if p.bias is not None else ''}" for p in self.parts
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary(Op):
    """Rotate the first 2 * half columns of each head by the Rope record's cos and sin, copy the rest"""

    code: ClassVar[int] = 6
    x: View = reads(ROWS)
    table: int = reads(ROWS)
    out: int = writes(ROWS)
    interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + half)

    def check(self, plan):
        self.need_view(plan, self.x)
        self.need(plan.buffers[self.out].width == self.x.count * self.x.size, "rotary width")
        self.need(plan.buffers[self.table].width <= self.x.size, "rotary dimensions")

    def detail(self):
        return f"{self.x}{' interleaved' if self.interleaved else ''}"


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheWrite(Op):
    """Store K and V of the step's tokens in the layer's pages; on decode steps Attend does it itself"""

    code: ClassVar[int] = 7
    k: View = reads(ROWS)
    v: View = reads(ROWS)

    def check(self, plan):
        self.need_view(plan, self.k)
        self.need_view(plan, self.v)

    def detail(self):
        return f"k {self.k} v {self.v}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Attend(Op):
    """Causal attention over the layer's pages, blocks of keys joined in slot order (kernels' paged.py)"""

    code: ClassVar[int] = 8
    q: View = reads(ITEMS)
    k: View = reads(ITEMS)  # as in the CacheWrite before it
    v: View = reads(ITEMS)
    out: int = writes(ITEMS)  # [H * Dv]
    scale: float
    window: int = 0  # slots a token sees, itself included; 0 all
    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # [H] fp32
    slopes: torch.Tensor | None = None  # [H] fp32, alibi

    def check(self, plan):
        for view in (self.q, self.k, self.v):
            self.need_view(plan, view)
        ratio = self.q.count // self.k.count
        self.need(
            self.q.count % self.k.count == 0, f"{self.q.count} query heads over {self.k.count} KV heads"
        )
        self.need(ratio <= 64, f"{ratio} query heads a KV head (at most 64)")
        self.need(self.q.size == self.k.size and self.k.count == self.v.count, "head sizes")
        self.need(self.q.size <= 512 and self.v.size <= 512, f"head size {self.q.size} (at most 512)")
        self.need(plan.buffers[self.out].width == self.q.count * self.v.size, "attention width")
        for tensor in (self.sinks, self.slopes):
            self.need_tensor(tensor, (self.q.count,), "sinks or slopes", _FP32)

    def detail(self):
        extra = f" window {self.window}" if self.window else ""
        extra += f" softcap {self.softcap:g}" if self.softcap else ""
        extra += " sinks" if self.sinks is not None else ""
        extra += " alibi" if self.slopes is not None else ""
        return f"q {self.q} k {self.k} v {self.v} scale {self.scale:.4g}{extra}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Join(Op):
    """Finish the heads whose keys several threads shared in the Attend record before it, copy the others"""

    code: ClassVar[int] = 13
    x: int = reads(ROWS)
    out: int = writes(ROWS)
    attend: Attend

    def check(self, plan):
        same = plan.buffers[self.x].width == plan.buffers[self.out].width
        self.need(self.x == self.attend.out and same, "attention width")

    def tensors(self):
        return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Act(Op):
    """out = act(gate) * up, or act(gate)"""

    code: ClassVar[int] = 9
    gate: View = reads(COLS)
    up: View | None = reads(COLS)
    out: int = writes(COLS)
    kind: str

    def check(self, plan):
        self.need(self.gate.count == 1 and self.kind in ACTIVATIONS, f"activation {self.kind}")
        self.need_view(plan, self.gate)
        if self.up is not None:
            self.need_view(plan, self.up)
            self.need(self.up.count == 1 and self.up.size == self.gate.size, "gate and up")
        self.need(plan.buffers[self.out].width == self.gate.size, "activation width")

    def detail(self):
        return f"{self.kind} {self.gate}{f' * {self.up}' if self.up is not None else ''}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Add(Op):
    """x += y, the residual stream"""

    code: ClassVar[int] = 10
    x: int = updates(ROWS)
    y: int = reads(ROWS)

    def check(self, plan):
        x, y = plan.buffers[self.x], plan.buffers[self.y]
        self.need(x.width == y.width and x.rows == y.rows, "residual width")

    def detail(self):
        return f"b{self.x} += b{self.y}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather(Op):
    """out[i] = x[asked[i]]: from here on only the rows whose logits are asked for"""

    code: ClassVar[int] = 11
    x: int = reads(ALL)
    out: int = writes(ROWS)

    def check(self, plan):
        x, out = plan.buffers[self.x], plan.buffers[self.out]
        self.need(x.rows == TOKENS and out.rows == ASKED and x.width == out.width, "gathered rows")

    def detail(self):
        return f"b{self.x} -> b{self.out}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Logits(Op):
    """What the step returns: scale * x, or softcap * tanh(scale * x / softcap), in the model's dtype"""

    code: ClassVar[int] = 12
    x: int = reads(COLS)
    n: int
    scale: float = 1.0
    softcap: float = 0.0

    def check(self, plan):
        self.need(plan.buffers[self.x].width == self.n == plan.out_width, "width of the result")
        self.need(plan.buffers[self.x].rows == ASKED, "rows of the result")

    def detail(self):
        return f"{self.n}{f' softcap {self.softcap:g}' if self.softcap else ''}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Route(Op):
    """Softmax over experts' scores, the k largest by ascending expert, and their weights"""

    code: ClassVar[int] = 14
    x: int = reads(ROWS)  # [experts]
    chosen: int = writes(ROWS)  # i32 [k]
    weights: int = writes(ROWS)  # [k]
    renormalize: bool  # divide the weights by their sum

    def check(self, plan):
        x, chosen, weights = (plan.buffers[b] for b in (self.x, self.chosen, self.weights))
        self.need(chosen.kind == "i32" and chosen.width == weights.width <= x.width, "chosen experts")

    def detail(self):
        return (
            f"{'renormalized' if self.renormalize else 'softmax'} b{self.x} -> b{self.chosen} b{self.weights}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch(Op):
    """A row of x for each choice of an expert, those of one expert together, tokens in order"""

    code: ClassVar[int] = 17
    x: int = reads(ALL)
    chosen: int = reads(ALL)
    out: int = writes(ROWS)
    experts: int

    def check(self, plan):
        x, chosen, out = (plan.buffers[b] for b in (self.x, self.chosen, self.out))
        self.need(
            x.width == out.width and out.per_row == chosen.width and x.rows == out.rows, "dispatched rows"
        )

    def detail(self):
        return f"b{self.x} -> b{self.out}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts(Op):
    """Each expert's matrix times its rows; `outs` are one view of the product or two halves of it"""

    code: ClassVar[int] = 15
    x: int = reads(ALL)
    chosen: int = reads(ALL)
    outs: tuple[View, ...] = writes(COLS)
    matrix: Matrix

    def matrices(self):
        return (self.matrix,)

    def check(self, plan):
        self.matrix.check()
        x, out = plan.buffers[self.x], plan.buffers[self.outs[0].buffer]
        self.need(self.matrix.experts > 0 and self.matrix.bias is None, "stacked matrices without bias")
        self.need(self.matrix.k == x.width and self.matrix.n == out.width, "experts' width")
        self.need(x.per_row == out.per_row == plan.buffers[self.chosen].width, "rows of the experts")
        self.need(
            acts_key(self.matrix) == (acts_key(x.acts) if x.kind == "acts" else None), "activation chunks"
        )
        for at, view in enumerate(self.outs):
            self.need_view(plan, view)
            self.need(view.size * len(self.outs) == out.width and view.offset == at * view.size, "halves")
            self.need(len(self.outs) == 1 or view.size % BLOCK_ROWS == 0, "halves in whole blocks")

    def detail(self):
        m = self.matrix
        return f"{m.experts} x [{m.n}, {m.k}] {m.format}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Mix(Op):
    """out = sum over the token's experts, in order, of weight * y"""

    code: ClassVar[int] = 16
    y: int = reads(ALL)
    chosen: int = reads(ALL)
    weights: int = reads(ROWS)
    out: int = writes(ROWS)
    experts: int

    def check(self, plan):
        y, chosen, out = (plan.buffers[b] for b in (self.y, self.chosen, self.out))
        self.need(y.width == out.width and y.per_row == chosen.width, "mixed rows")
