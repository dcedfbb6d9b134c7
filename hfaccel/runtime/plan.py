"""The CPU plan as data: a flat list of records that a C++ walker and a PyTorch reference executor both read.

A record names what it reads and writes (buffers of the arena, by number), its sizes and the tensors it uses
in place. Every thread of one parallel region walks the whole list; `how` says which part of a buffer it
touches:

    ROWS   its own rows. On small steps every thread does all rows, in a copy of its own ("replicated"):
           a norm of one row costs less than a barrier.
    COLS   its own columns, whole blocks of 16
    ITEMS  its own (sequence, KV head, keys)
    ALL    everything

`Plan.sync` turns that into barriers: one stands before a record only where it reads what another thread wrote
since the last barrier, or overwrites what another may still read. Products of 16 tokens and more, which
threads take in pieces, have another one behind them. The records are in `plan_ops.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

import torch

from hfaccel.runtime import Unsupported
from hfaccel_kernels.layouts import Layout

if TYPE_CHECKING:
    from hfaccel.runtime.plan_ops import Attend, CacheWrite

SCHEMA = 2
ROWS, COLS, ITEMS, ALL = "rows", "cols", "items", "all"
TOKENS, ASKED = "tokens", "asked"  # rows of a buffer: the step's tokens, or those whose logits are asked for
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Matrix:
    """One weight `[n, k]` as it lies in its module: packed in `layout`, or plain rows of a float dtype.

    `transposed` marks transformers' Conv1D, whose weight is [k, n]. `experts` > 0 marks as many matrices in
    one stacked tensor. What it multiplies has been multiplied by `input_scale` (fp32 [k]) by another record.
    """

    n: int
    k: int
    weight: torch.Tensor
    layout: Layout | None = None
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    transposed: bool = False
    experts: int = 0
    input_scale: torch.Tensor | None = None

    @property
    def format(self) -> str:
        if self.layout is None:
            return str(self.weight.dtype).removeprefix("torch.") + ("^T" if self.transposed else "")
        group = "" if self.layout.group == -1 else f"g{self.layout.group}"
        if self.layout.code != "int":
            return self.layout.code + group
        if self.layout.act == "token":
            return f"int8{group}a8"
        return f"int{self.layout.bits}{group}{'' if self.layout.symmetric else 'z'}"

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.weight, self.scale, self.zero, self.bias) if t is not None)

    def check(self) -> None:
        """Shapes, dtypes and contiguity against `n`, `k` and the layout; raises Unsupported."""
        lead = (self.experts,) if self.experts else ()
        shapes: dict[str, tuple] = {"bias": ((self.n,), None)}
        if self.layout is None:
            shapes["weight"] = ((self.k, self.n) if self.transposed else (self.n, self.k), None)
        else:
            shapes |= self.layout.shapes(self.n, self.k)
            if why := self.layout.too_long(self.k):
                raise Unsupported(f"a weight of {self.format}: {why}")
        have = {
            "weight": self.weight,
            "weight_scale": self.scale,
            "weight_zero": self.zero,
            "bias": self.bias,
        }
        for name, tensor in have.items():
            if (tensor is None) != (name not in shapes) and name != "bias":
                what = "missing" if tensor is None else "not expected"
                raise Unsupported(f"{name} is {what} in a weight of {self.format}")
            if tensor is None:
                continue
            shape, dtype = shapes[name]
            shape = (*lead, *shape)
            if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
                raise Unsupported(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype or ''} {list(shape)}"
                )
            if dtype is None and tensor.dtype not in FLOATS:
                raise Unsupported(f"{name} is {tensor.dtype}: known are {', '.join(map(str, FLOATS))}")
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise Unsupported(f"{name} is not contiguous on the CPU")


def acts_key(matrix: Matrix) -> tuple | None:
    """Packed matrices with one key share quantized input; None for plain ones, which take fp32."""
    layout = matrix.layout
    return None if layout is None else (matrix.k, layout.acts_key, layout.chunks(matrix.k))


@dataclass(frozen=True)
class Buffer:
    """`width` elements for each row of `rows` (TOKENS or ASKED), `per_row` times.

    `kind` is "f32", "i32", "acts" (rows quantized for matrices like `acts`) or "out" (what the step returns).
    """

    name: str
    width: int
    rows: str = TOKENS
    kind: str = "f32"
    per_row: int = 1
    acts: Matrix | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class View:
    """`count` heads of `size` columns inside the rows of a buffer: head h starts at `offset + h * stride`."""

    buffer: int
    offset: int
    count: int
    size: int
    stride: int

    def __str__(self) -> str:
        start = f"{self.offset}:" if self.offset else ""
        stride = f"/{self.stride}" if self.count > 1 and self.stride != self.size else ""
        return f"b{self.buffer}[{start}{self.count}x{self.size}{stride}]"


def reads(how: str):
    """A buffer (number or View) that a record reads; None where there is none."""
    return field(metadata={"role": "read", "how": how}, default=None)


def writes(how: str):
    return field(metadata={"role": "write", "how": how}, default=None)


def updates(how: str):
    return field(metadata={"role": "update", "how": how})


@dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """A record. `code` is its number in csrc/plan.h; `name` says where in the model it comes from."""

    code: ClassVar[int]
    name: str
    layer: int = -1

    def accesses(self, plan: Plan) -> Iterator[tuple[int, str, bool, bool, object]]:
        """(buffer, how, reads, writes, what columns are cut by) of each buffer the record touches."""
        for item in fields(self):
            role, value = item.metadata.get("role"), getattr(self, item.name)
            if role is None or value is None:
                continue
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, View):
                    number, cut = one.buffer, one.size if one.offset == 0 else (one.offset, one.size)
                else:
                    number, cut = one, plan.buffers[one].width
                yield number, item.metadata["how"], role != "write", role != "read", cut

    def matrices(self) -> tuple[Matrix, ...]:
        return ()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every model tensor the record points to."""
        own = tuple(v for v in (getattr(self, f.name) for f in fields(self)) if isinstance(v, torch.Tensor))
        return own + tuple(t for m in self.matrices() for t in m.tensors())

    def check(self, plan: Plan) -> None:
        """Sizes against the buffers; raises Unsupported."""

    def detail(self) -> str:
        return ""

    def weight_bytes(self) -> int:
        """Bytes of weights that a step of one token reads here."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def need(self, ok: bool, what: str) -> None:
        if not ok:
            raise Unsupported(f"{self.name} ({type(self).__name__}): {what} does not fit")

    def need_tensor(
        self, tensor: torch.Tensor | None, shape: tuple, what: str, dtypes: tuple = FLOATS
    ) -> None:
        """Shape, dtype and place of a tensor that the record points to, or None."""
        if tensor is None:
            return
        self.need(tuple(tensor.shape) == shape and tensor.is_contiguous(), what)
        self.need(tensor.dtype in dtypes, f"{what} of {tensor.dtype}")
        self.need(tensor.device.type == "cpu", f"{what} on {tensor.device}")

    def need_view(self, plan: Plan, view: View) -> None:
        last = view.offset + (view.count - 1) * view.stride + view.size
        inside = (
            view.count > 0 and view.size > 0 and view.offset >= 0 and last <= plan.buffers[view.buffer].width
        )
        self.need(inside, str(view))


@dataclass
class Plan:
    """Records and buffers of one model.

    Attributes:
        vocab: ids 0 .. vocab - 1 may be looked up. out_width: columns of what the last record returns.
        dtype: of what a step returns. max_positions: rows of the learned position table, 0 where unlimited.
    """

    ops: list[Op]
    buffers: list[Buffer]
    vocab: int
    out_width: int
    dtype: torch.dtype
    max_positions: int = 0
    schema: int = SCHEMA

    def check(self) -> None:
        """Every record against its buffers, before anything walks the list; raises Unsupported."""
        for op in self.ops:
            op.check(self)
        self.private()

    def layers(self) -> dict[int, CacheWrite | Attend]:
        """Layer -> a record with its K and V views: one set of pages each, numbered in this order."""
        from hfaccel.runtime.plan_ops import Attend, CacheWrite

        found: dict[int, CacheWrite | Attend] = {}
        for op in self.ops:
            if isinstance(op, Attend | CacheWrite):
                found.setdefault(op.layer, op)
        return found

    def private(self) -> list[bool]:
        """Per buffer: written by ROWS records alone, so on small steps each thread keeps its own copy."""
        kinds: list[set[str]] = [set() for _ in self.buffers]
        for op in self.ops:
            for number, how, _, write, _ in op.accesses(self):
                if write:
                    kinds[number].add(how)
        for buffer, kind in zip(self.buffers, kinds, strict=True):
            if ROWS in kind and len(kind) > 1:
                raise Unsupported(
                    f"buffer {buffer.name} is written by rows and by {', '.join(kind - {ROWS})}"
                )
        return [kind == {ROWS} for kind in kinds]

    def sync(self, replicated: bool, fused: bool) -> list[bool]:
        """Whether a barrier stands before each record.

        Args:
            replicated: every thread does all rows of ROWS records in its own copies.
            fused: decode steps, where an Attend record writes its own keys and no CacheWrite runs.
        """
        from hfaccel.runtime.plan_ops import Attend, CacheWrite

        private = self.private()
        pages = len(self.buffers)  # a pseudo-buffer: KV pages, written by rows or items, read by items
        last: dict[int, set] = {}  # buffer -> (way, wrote) since the last barrier
        result = []
        for op in self.ops:
            touched: list[tuple[int, tuple, bool]] = []
            skipped = fused and isinstance(op, CacheWrite)
            for number, how, _, write, cut in op.accesses(self):
                if skipped or (replicated and private[number]):
                    continue
                if how == ROWS and replicated:
                    how = ALL
                if how != COLS:
                    cut = (self.buffers[number].rows, self.buffers[number].per_row)
                touched.append((number, (how, cut), write))
            if isinstance(op, CacheWrite) and not fused:
                touched.append((pages, (ROWS, TOKENS), True))
            if isinstance(op, Attend):
                touched.append((pages, (ITEMS, TOKENS), fused))
            barrier = any(
                (write or wrote) and (way != other or ALL in (way[0], other[0]))
                for number, way, write in touched
                for other, wrote in last.get(number, ())
            )
            if barrier:
                last.clear()
            result.append(barrier)
            for number, way, write in touched:
                last.setdefault(number, set()).add((way, write))
        return result

    def weight_bytes(self) -> int:
        """Bytes of weights that a step of one token reads."""
        return sum(op.weight_bytes() for op in self.ops)

    def with_ops(self, ops: list[Op]) -> Plan:
        """The same plan with other records: for tests that take one out."""
        return Plan(
            ops, self.buffers, self.vocab, self.out_width, self.dtype, self.max_positions, self.schema
        )

    def __str__(self) -> str:
        small, large = self.sync(True, True), self.sync(False, False)
        lines = [
            f"plan schema {self.schema}: {len(self.ops)} records, {len(self.buffers)} buffers, "
            f"{self.weight_bytes() / 1e6:.2f} MB of weights a token, "
            f"{sum(small)} barriers a decode step (|), {sum(large)} on large steps (:)",
            f"{'#':>4}   {'op':<10} {'name':<48} {'kB':>9}  what",
        ]
        for index, op in enumerate(self.ops):
            mark = "|" if small[index] else ":" if large[index] else " "
            kb = f"{op.weight_bytes() / 1e3:.1f}" if op.weight_bytes() else ""
            line = f"{index:>4} {mark} {type(op).__name__.lower():<10} {op.name:<48} {kb:>9}  {op.detail()}"
            lines.append(line.rstrip())
        return "\n".join(lines)
