"""LoRA in a plan: a record before a module's products and one after, for any mix of adapters in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hfaccel.lora.slots import Table
from hfaccel.runtime.plan import ALL, COLS, ROWS, Matrix, Op, reads, updates, writes

if TYPE_CHECKING:
    from hfaccel.runtime.plan_build import Builder


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraShrink(Op):
    """out[t, :rank[s]] = scale[s] * (x[t] a[s].T), s the slot of the token's adapter; nothing without one"""

    code: ClassVar[int] = 19
    x: int = reads(ROWS)
    out: int = writes(ROWS)
    table: Table

    def check(self, plan):
        x, out, table = plan.buffers[self.x], plan.buffers[self.out], self.table
        self.need(x.kind == "f32" and table.a.shape[2] == x.width, "width of the adapters' A")
        self.need(table.a.shape[1] == out.width and out.rows == x.rows, "ranks")
        check_table(self, table)

    def detail(self):
        return f"{list(self.table.a.shape)} {str(self.table.a.dtype).removeprefix('torch.')}"

    def weight_bytes(self):
        return 0  # of a token without an adapter


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraExpand(Op):
    """y[t] += x[t, :rank[s]] b[s][:, offset:], s the slot of the token's adapter; nothing without one"""

    code: ClassVar[int] = 20
    x: int = reads(ALL)
    y: int = updates(COLS)
    table: Table
    offset: int = 0  # first of the table's columns that lies in y

    def check(self, plan):
        x, y, table = plan.buffers[self.x], plan.buffers[self.y], self.table
        self.need(y.kind == "f32" and x.rows == y.rows and table.b.shape[1] == x.width, "ranks")
        self.need(0 <= self.offset <= table.b.shape[2] - y.width, "width of the adapters' B")
        check_table(self, table)

    def detail(self):
        return f"{list(self.table.b.shape)} {str(self.table.b.dtype).removeprefix('torch.')}"

    def weight_bytes(self):
        return 0


def check_table(op: LoraShrink | LoraExpand, table: Table) -> None:
    """Shapes, dtypes and places of a table's tensors."""
    slots, ranks, k = table.a.shape
    op.need(table.a.dtype == table.b.dtype, "A and B of the adapters")
    op.need_tensor(table.a, (slots, ranks, k), "A of the adapters")
    op.need_tensor(table.b, (slots, ranks, table.b.shape[-1]), "B of the adapters")
    op.need_tensor(table.scale, (slots,), "scales of the adapters", (torch.float32,))
    op.need_tensor(table.rank, (slots,), "ranks of the adapters", (torch.int32,))


def adapters(builder: Builder, x: int, parts: list[tuple[str, Matrix, int]], layer: int) -> list[Op]:
    """Appends the first records of the adapters beside products of buffer `x`; returns the second, to be done
    after the products. `parts`: (name, matrix, output buffer) of each."""
    expands, hidden, offsets = [], {}, {}
    for name, matrix, out in parts:
        module = name.partition("[")[0]  # a fused module's rows may be cut: "...gate_up_proj[up]"
        if (table := builder.tables.get(module)) is None:
            continue
        if module not in hidden:
            hidden[module] = builder.buffer(f"lora {len(hidden)}", table.a.shape[1], builder.rows(x))
            where = {"layer": layer, "x": x, "out": hidden[module]}
            builder.ops.append(LoraShrink(name=f"{module} lora_A", table=table, **where))
            builder.beside.add(module)
        at = offsets.get(module, 0)
        offsets[module] = at + matrix.n
        where = {"layer": layer, "x": hidden[module], "y": out, "offset": at}
        expands.append(LoraExpand(name=f"{name} lora_B", table=table, **where))
    return expands
