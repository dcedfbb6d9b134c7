"""A plan as the C structs of csrc/plan.h, with everything they point to kept alive."""

from __future__ import annotations

import ctypes

import torch

from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import ASKED, SCHEMA, Matrix, Op, Plan, View
from hfaccel.runtime.plan_lora import LoraExpand, LoraShrink
from hfaccel.runtime.plan_ops import (
    ACTIVATIONS,
    Act,
    Add,
    Attend,
    CacheWrite,
    Dispatch,
    Embed,
    Experts,
    Join,
    Logits,
    Matmul,
    Mix,
    Norm,
    Rope,
    Rotary,
    Route,
    Scale,
)
from hfaccel_kernels import native

_KINDS = {"f32": 0, "acts": 1, "i32": 2, "out": 3}
_i32, _i64, _f32, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

PAGES_I8 = 16  # HFA_PAGES_I8


class ViewStruct(ctypes.Structure):
    _fields_ = [(name, _i32) for name in ("buffer", "offset", "count", "size", "stride")]


class OpStruct(ctypes.Structure):
    _fields_ = [
        ("kind", _i32),
        ("sync", _i32),
        ("view", ViewStruct * 3),
        ("out", _i32 * 3),
        ("ints", _i32 * 4),
        ("reals", _f32 * 4),
        ("ptr", _ptr * 4),
        ("dtype", _i32 * 4),
        ("weight", ctypes.POINTER(native.Weight)),
        ("weights", _i64),
    ]


class BufferStruct(ctypes.Structure):
    _fields_ = [
        ("width", _i64),
        ("kind", _i32),
        ("per_row", _i32),
        ("asked", _i32),
        ("own", _i32),
        ("acts", ctypes.POINTER(native.Weight)),
    ]


class PlanStruct(ctypes.Structure):
    _fields_ = [
        ("schema", _i32),
        ("ops", _i32),
        ("buffers", _i32),
        ("layers", _i32),
        ("op", ctypes.POINTER(OpStruct)),
        ("buffer", ctypes.POINTER(BufferStruct)),
        ("vocab", _i64),
        ("max_positions", _i64),
    ]


class Pages(ctypes.Structure):
    _fields_ = [
        ("k", _ptr),
        ("v", _ptr),
        ("k_scale", _ptr),
        ("v_scale", _ptr),
        ("kv_heads", _i32),
        ("k_size", _i32),
        ("v_size", _i32),
        ("dtype", _i32),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("tokens", _i64),
        ("asked", _i64),
        ("sequences", _i64),
        ("ids", _ptr),
        ("positions", _ptr),
        ("block_tables", _ptr),
        ("table_stride", _i64),
        ("q_starts", _ptr),
        ("lengths", _ptr),
        ("rows", _ptr),
        ("pages", _ptr),
        ("pages_count", _i64),
        ("page_tokens", _i64),
        ("logits", _ptr),
        ("logits_ld", _i64),
        ("logits_dtype", _i32),
        ("threads", _i32),
        ("replicate", _i32),
        ("top", _i32),
        ("arena", _ptr),
        ("arena_bytes", _i64),
        ("profile", _ptr),
        ("ahead", _i64),
        ("ends", _ptr),
        ("ends_count", _i64),
        ("best", _ptr),
        ("best_ids", _ptr),
        ("done", _i64),
        ("adapters", _ptr),
    ]


def weight_struct(matrix: Matrix, expert: int = 0) -> native.Weight:
    """The C form of a matrix, or of one of its experts; the tensors must outlive it."""
    w = native.Weight()
    w.n, w.k = matrix.n, matrix.k
    w.data = _address(matrix.weight, expert, matrix)
    w.ld = matrix.n if matrix.transposed else matrix.k
    if matrix.bias is not None:
        w.bias, w.bias_dtype = matrix.bias.data_ptr(), native.DTYPES[matrix.bias.dtype]
    if matrix.layout is None:
        w.kind = native.PLAIN[matrix.weight.dtype]
        return w
    for field, value in native.packed(matrix.layout).items():
        setattr(w, field, value)
    w.scale = _address(matrix.scale, expert, matrix)
    if matrix.zero is not None:
        w.zero = _address(matrix.zero, expert, matrix)
    return w


def _address(tensor: torch.Tensor, expert: int, matrix: Matrix) -> int:
    """Of the expert's slice, or of the whole."""
    bytes_ = tensor.numel() * tensor.element_size()
    return tensor.data_ptr() + (expert * (bytes_ // matrix.experts) if matrix.experts else 0)


class Encoded:
    """A plan as C structs, with everything they point to kept alive."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.keep: list = []
        self.ops = (OpStruct * len(plan.ops))()
        self.buffers = (BufferStruct * len(plan.buffers))()
        private = plan.private()
        for c, buffer, own in zip(self.buffers, plan.buffers, private, strict=True):
            c.width, c.kind, c.per_row = buffer.width, _KINDS[buffer.kind], buffer.per_row
            c.asked, c.own = buffer.rows == ASKED, own
            if buffer.acts is not None:
                c.acts = self.weights((buffer.acts,))
        modes = [plan.sync(bool(mode & 1), bool(mode & 2)) for mode in range(4)]
        self.layers = {layer: number for number, layer in enumerate(plan.layers())}
        for i, (c, op) in enumerate(zip(self.ops, plan.ops, strict=True)):
            c.kind = op.code
            c.sync = sum(flags[i] << mode for mode, flags in enumerate(modes))
            self.encode(c, op)
        self.c = PlanStruct(
            SCHEMA,
            len(plan.ops),
            len(plan.buffers),
            len(self.layers),
            self.ops,
            self.buffers,
            plan.vocab,
            plan.max_positions,
        )

    def weights(self, matrices: tuple[Matrix, ...]):
        each = [weight_struct(m, expert) for m in matrices for expert in range(max(1, m.experts))]
        array = (native.Weight * len(each))(*each)
        self.keep += [array, *(t.detach() for m in matrices for t in m.tensors())]
        return ctypes.cast(array, ctypes.POINTER(native.Weight))

    def tensors(self, c: OpStruct, *tensors: torch.Tensor | None) -> None:
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                self.keep.append(tensor.detach())
                c.ptr[i], c.dtype[i] = tensor.data_ptr(), native.DTYPES[tensor.dtype]

    def views(self, c: OpStruct, *views: View | int | None) -> None:
        for i in range(3):
            view = views[i] if i < len(views) else None
            if view is None:
                c.view[i] = ViewStruct(-1, 0, 0, 0, 0)
            elif isinstance(view, View):
                c.view[i] = ViewStruct(view.buffer, view.offset, view.count, view.size, view.stride)
            else:
                width = self.plan.buffers[view].width
                c.view[i] = ViewStruct(view, 0, 1, width, width)

    def encode(self, c: OpStruct, op: Op) -> None:
        outs = op.outs if isinstance(op, Matmul) else (getattr(op, "out", None),)
        if isinstance(op, Experts):
            outs = (op.outs[0].buffer,)
        elif isinstance(op, Route):
            outs = (op.chosen, op.weights)
        for i in range(3):
            c.out[i] = outs[i] if i < len(outs) and outs[i] is not None else -1
        if matrices := op.matrices():
            c.weight = self.weights(matrices)
            c.weights = sum(max(1, m.experts) for m in matrices)
        self.views(c, getattr(op, "x", None))
        if isinstance(op, Embed):
            c.reals[0], c.ints[0] = op.multiplier, op.position_offset
            self.tensors(c, op.positions)
        elif isinstance(op, Rope):
            c.reals[0] = op.scaling
            self.tensors(c, op.inv_freq)
        elif isinstance(op, Norm):
            c.reals[0], c.ints[0] = op.eps, op.centered | op.unit_offset << 1
            self.tensors(c, op.weight, op.bias)
        elif isinstance(op, Scale):
            self.tensors(c, op.scale)
        elif isinstance(op, LoraShrink | LoraExpand):
            shrink, table = isinstance(op, LoraShrink), op.table
            matrices = table.a if shrink else table.b
            self.tensors(c, matrices)
            self.keep += [table.rank, table.scale]
            c.ptr[1], c.ptr[2] = table.rank.data_ptr(), table.scale.data_ptr()
            c.ints[0], c.ints[1], c.ints[2] = matrices.shape
            if not shrink:
                c.ints[3], c.out[0] = op.offset, op.y
        elif isinstance(op, Matmul):
            c.ints[0] = op.parts[0].transposed
        elif isinstance(op, Rotary):
            self.views(c, op.x, op.table)
            c.ints[0] = op.interleaved
        elif isinstance(op, CacheWrite):
            self.views(c, op.k, op.k, op.v)
            c.ints[0] = self.layers[op.layer]
        elif isinstance(op, Attend | Join):
            attend = op if isinstance(op, Attend) else op.attend
            self.views(c, attend.q, attend.k, attend.v)
            c.ints[0], c.ints[1], c.ints[2] = self.layers[op.layer], attend.window, attend.out
            c.reals[0], c.reals[1] = attend.scale, attend.softcap
            self.tensors(c, attend.sinks, attend.slopes)
        elif isinstance(op, Act):
            self.views(c, op.gate, op.up)
            c.ints[0] = ACTIVATIONS.index(op.kind)
        elif isinstance(op, Add):
            self.views(c, op.y)
            c.out[0] = op.x
        elif isinstance(op, Route):
            c.ints[0], c.ints[1] = self.plan.buffers[op.chosen].width, op.renormalize
        elif isinstance(op, Dispatch):
            self.views(c, op.x, op.chosen)
            c.ints[0] = op.experts
        elif isinstance(op, Experts):
            self.views(c, op.x, op.chosen)
            c.ints[0] = len(op.outs)
        elif isinstance(op, Mix):
            self.views(c, op.y, op.chosen, op.weights)
            c.ints[0] = op.experts
        elif isinstance(op, Logits):
            c.reals[0], c.reals[1] = op.scale, op.softcap


def bind(library: ctypes.CDLL) -> None:
    """Argument types, and that both sides agree on every struct."""
    library.hfa_sizeof_plan.restype = _i64
    for number, struct in enumerate((OpStruct, BufferStruct, PlanStruct, Pages, Step)):
        if library.hfa_sizeof_plan(number) != ctypes.sizeof(struct):
            raise Unsupported(
                f"C++ kernels: {struct.__name__} differs in size; the build is of another version"
            )
    library.hfa_plan_run.argtypes, library.hfa_plan_run.restype = [_ptr, _ptr], ctypes.c_int
    library.hfa_plan_offsets.argtypes, library.hfa_plan_offsets.restype = [_ptr, _ptr, _ptr], None
    library.hfa_plan_arena.argtypes, library.hfa_plan_arena.restype = [_ptr, _ptr], _i64
