"""Executor `native`: a whole step in C++ with one call from Python (kernels' csrc/plan.cpp walks the plan).

The plan is a view: records point into the modules' own tensors. Whoever keeps an executor compares the
runner's fingerprint at each request and builds a new one on a mismatch; tensors that were replaced stay alive
as long as the plan that points at them.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import torch
from torch import nn

from hfaccel.cache.pool import PagePool
from hfaccel.errors import PatchError
from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import ASKED, SCHEMA, Matrix, Op, Plan, View
from hfaccel.runtime.plan_build import build
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
)
from hfaccel_kernels import native
from hfaccel_kernels.layouts import ACT_CHUNK

REPLICATE_TOKENS = 2  # steps up to this size do row records in every thread; see csrc/plan.h
_PAGES_I8 = 16
_KINDS = {"f32": 0, "acts": 1, "i32": 2, "out": 3}
_i32, _i64, _f32, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

# Return values of hfa_plan_run: csrc/plan.cpp's Error
_SCHEMA, _ARENA = 1, 8
_REFUSALS = {
    2: "the step's sizes contradict each other",
    3: "a token id outside the vocabulary of {vocab}",
    4: "a position that is negative or beyond the model's table of {max_positions}",
    5: "a sequence shorter than its new tokens",
    6: "a block table entry outside the pool of {pages} pages",
    7: "a row outside the step",
    9: "pages that do not fit the model",
}


class _View(ctypes.Structure):
    _fields_ = [(name, _i32) for name in ("buffer", "offset", "count", "size", "stride")]


class _Op(ctypes.Structure):
    _fields_ = [
        ("kind", _i32),
        ("sync", _i32),
        ("view", _View * 3),
        ("out", _i32 * 3),
        ("ints", _i32 * 4),
        ("reals", _f32 * 4),
        ("ptr", _ptr * 4),
        ("dtype", _i32 * 4),
        ("weight", ctypes.POINTER(native.Weight)),
        ("weights", _i64),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("width", _i64),
        ("kind", _i32),
        ("per_row", _i32),
        ("asked", _i32),
        ("own", _i32),
        ("acts", ctypes.POINTER(native.Weight)),
    ]


class _Plan(ctypes.Structure):
    _fields_ = [
        ("schema", _i32),
        ("ops", _i32),
        ("buffers", _i32),
        ("layers", _i32),
        ("op", ctypes.POINTER(_Op)),
        ("buffer", ctypes.POINTER(_Buffer)),
        ("vocab", _i64),
        ("max_positions", _i64),
    ]


class _Pages(ctypes.Structure):
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


class _Step(ctypes.Structure):
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
        ("reserved", _i32),
        ("arena", _ptr),
        ("arena_bytes", _i64),
        ("profile", _ptr),
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
    layout = matrix.layout
    w.kind, w.bits, w.group = native.PACKED, layout.bits, layout.group
    w.act_bits, w.chunk = layout.act_bits, ACT_CHUNK[layout.act_bits]
    w.scale, w.scale_dtype = _address(matrix.scale, expert, matrix), native.DTYPES[matrix.scale.dtype]
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
        self.ops = (_Op * len(plan.ops))()
        self.buffers = (_Buffer * len(plan.buffers))()
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
        self.c = _Plan(
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

    def tensors(self, c: _Op, *tensors: torch.Tensor | None) -> None:
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                self.keep.append(tensor.detach())
                c.ptr[i], c.dtype[i] = tensor.data_ptr(), native.DTYPES[tensor.dtype]

    def views(self, c: _Op, *views: View | int | None) -> None:
        for i in range(3):
            view = views[i] if i < len(views) else None
            if view is None:
                c.view[i] = _View(-1, 0, 0, 0, 0)
            elif isinstance(view, View):
                c.view[i] = _View(view.buffer, view.offset, view.count, view.size, view.stride)
            else:
                width = self.plan.buffers[view].width
                c.view[i] = _View(view, 0, 1, width, width)

    def encode(self, c: _Op, op: Op) -> None:
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


@dataclass
class Timing:
    """Nanoseconds of one record, in its own work and in the barrier before it, over the profiled steps."""

    op: Op
    work_ns: int
    wait_ns: int


class Native:
    """Runs steps of one plan. Thread-safe: a step holds the lock, scratch memory belongs to it."""

    name = "native"

    def __init__(self, model: nn.Module, plan: Plan | None = None):
        try:
            self.library = native.library()
        except native.NativeError as error:
            raise Unsupported(f"C++ kernels: {error}") from error
        _bind(self.library)
        self.model = model
        self.plan = build(model) if plan is None else plan
        self.lock = threading.Lock()
        self.replicate = REPLICATE_TOKENS
        self._encoded = Encoded(self.plan)
        self._hidden: Encoded | None = None
        self._step = _Step()
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._pages = None
        self._pages_of: tuple | None = None
        self._profile: dict[int, torch.Tensor] | None = None

    # -- what the runner calls

    def step(
        self,
        pool: PagePool,
        ids: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        q_starts: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        *,
        hidden: bool = False,
    ) -> torch.Tensor:
        """One step; arguments and result as `modules.Modules.step`.

        Raises: PatchError for ids, positions, rows or pages outside their range, before anything is written.
        """
        with self.lock:
            encoded = self._encoded
            if hidden:
                if self._hidden is None:
                    self._hidden = Encoded(build(self.model, hidden=True))
                encoded = self._hidden
            plan, asked = encoded.plan, rows.shape[0]
            out = torch.empty(asked, plan.out_width, dtype=plan.dtype)
            step = self._step
            keep = []
            for field, tensor, dtype in (
                ("ids", ids, torch.int64),
                ("positions", positions, torch.int64),
                ("block_tables", block_tables, torch.int32),
                ("q_starts", q_starts, torch.int32),
                ("lengths", lengths, torch.int32),
                ("rows", rows, torch.int64),
            ):
                if tensor.dtype != dtype or not tensor.is_contiguous():
                    tensor = tensor.to(dtype).contiguous()
                    keep.append(tensor)
                setattr(step, field, tensor.data_ptr())
            if positions.shape[0] != ids.shape[0] or q_starts.shape[0] != lengths.shape[0] + 1:
                raise PatchError(_REFUSALS[2])
            step.tokens, step.asked, step.sequences = ids.shape[0], asked, lengths.shape[0]
            step.table_stride = block_tables.shape[1]
            step.logits, step.logits_ld = out.data_ptr(), plan.out_width
            step.logits_dtype = native.DTYPES[plan.dtype]
            step.threads, step.replicate = torch.get_num_threads(), self.replicate
            if self._pages_of != (id(pool), pool.version):
                self._find_pages(pool)
            step.profile = self._profile_of(encoded)
            code = self.library.hfa_plan_run(ctypes.byref(encoded.c), ctypes.byref(step))
            if code == _ARENA:
                bytes_ = self.library.hfa_plan_arena(ctypes.byref(encoded.c), ctypes.byref(step))
                self._arena = None  # free before allocating the larger one
                self._arena = torch.empty(bytes_ + bytes_ // 4, dtype=torch.uint8)
                step.arena, step.arena_bytes = self._arena.data_ptr(), self._arena.numel()
                code = self.library.hfa_plan_run(ctypes.byref(encoded.c), ctypes.byref(step))
            if code:
                raise PatchError(
                    _REFUSALS.get(code, f"native step failed with {code}").format(
                        vocab=plan.vocab, max_positions=plan.max_positions, pages=step.pages_count
                    )
                )
            return out

    def _find_pages(self, pool: PagePool) -> None:
        layers = self.plan.layers()
        array = (_Pages * len(layers))()
        count = pool.capacity
        for c, op in zip(array, layers.values(), strict=True):
            pages = pool.ensure_layer(
                op.layer, op.k.count, op.k.size, op.v.size, self.plan.dtype, torch.device("cpu")
            )
            c.k, c.v = pages.k.data_ptr(), pages.v.data_ptr()
            c.kv_heads, c.k_size, c.v_size = op.k.count, op.k.size, op.v.size
            if pages.k_scale is None:
                c.dtype = native.DTYPES[pages.k.dtype]
            else:
                c.dtype = _PAGES_I8
                c.k_scale, c.v_scale = pages.k_scale.data_ptr(), pages.v_scale.data_ptr()
            count = min(count, pages.k.shape[0])
        self._pages = array
        self._step.pages = ctypes.addressof(array)
        self._step.pages_count, self._step.page_tokens = count, pool.page_tokens
        self._pages_of = (id(pool), pool.version)

    def buffers(self) -> list[torch.Tensor | None]:
        """What the last step left in each fp32 buffer, [rows, width]; only after steps with `replicate` 0."""
        step, plan = self._step, self.plan
        offsets = torch.zeros(len(plan.buffers), dtype=torch.int64)
        self.library.hfa_plan_offsets(ctypes.byref(self._encoded.c), ctypes.byref(step), offsets.data_ptr())
        found: list[torch.Tensor | None] = []
        for buffer, at in zip(plan.buffers, offsets.tolist(), strict=True):
            rows = (step.asked if buffer.rows == ASKED else step.tokens) * buffer.per_row
            size = rows * buffer.width * 4
            raw = self._arena[at : at + size] if buffer.kind in ("f32", "i32") else None
            dtype = torch.float32 if buffer.kind == "f32" else torch.int32
            found.append(None if raw is None else raw.view(dtype).view(rows, buffer.width).clone())
        return found

    # -- timing

    def profile(self, on: bool = True) -> None:
        """Start (from zero) or stop to time every record, as thread 0 sees it."""
        self._profile = {} if on else None

    def timings(self) -> list[Timing]:
        """What the profiled steps took, record by record."""
        found = self._profile or {}
        ns = found.get(id(self._encoded))
        ns = ns.tolist() if ns is not None else [[0, 0]] * len(self.plan.ops)
        return [Timing(op, work, wait) for op, (work, wait) in zip(self.plan.ops, ns, strict=True)]

    def _profile_of(self, encoded: Encoded) -> int | None:
        if self._profile is None:
            return None
        if id(encoded) not in self._profile:
            self._profile[id(encoded)] = torch.zeros(len(encoded.plan.ops), 2, dtype=torch.int64)
        return self._profile[id(encoded)].data_ptr()


def executor(model: nn.Module) -> Native:
    """The executor of a CPU model. Raises: Unsupported, with the reason."""
    if model.device.type != "cpu":
        raise Unsupported(f"the model is on {model.device}")
    return Native(model)


def _bind(library: ctypes.CDLL) -> None:
    """Argument types, and that both sides agree on every struct."""
    library.hfa_sizeof_plan.restype = _i64
    for number, struct in enumerate((_Op, _Buffer, _Plan, _Pages, _Step)):
        if library.hfa_sizeof_plan(number) != ctypes.sizeof(struct):
            raise Unsupported(
                f"C++ kernels: {struct.__name__} differs in size; the build is of another version"
            )
    library.hfa_plan_run.argtypes, library.hfa_plan_run.restype = [_ptr, _ptr], ctypes.c_int
    library.hfa_plan_offsets.argtypes, library.hfa_plan_offsets.restype = [_ptr, _ptr, _ptr], None
    library.hfa_plan_arena.argtypes, library.hfa_plan_arena.restype = [_ptr, _ptr], _i64
