"""From a model to its plan: one walk over `anatomy`'s blocks, no per-family code."""

from __future__ import annotations

import torch
from torch import nn

from hfaccel.anatomy import Anatomy, Block, anatomy
from hfaccel.errors import UnsupportedModel
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import ASKED, TOKENS, Buffer, Matrix, Op, Plan, View, acts_key
from hfaccel.runtime.plan_attention import attention
from hfaccel.runtime.plan_experts import experts
from hfaccel.runtime.plan_lora import adapters
from hfaccel.runtime.plan_ops import (
    Act,
    Add,
    Embed,
    Gather,
    Logits,
    Matmul,
    Norm,
    Quant,
    Scale,
)
from hfaccel.runtime.plan_weights import ACTIVATION_OF, activation, matrix_of, refuse_wrapped, split_rows

_PLACEMENTS = ("pre", "sandwich", "parallel", "post")
_POSITIONS = ("rotary", "learned", "alibi")


def build(model: nn.Module, *, hidden: bool = False, lora: AdapterSlots | None = None) -> Plan:
    """The checked plan of a decoder; with `hidden` it returns the last hidden states instead of logits.

    `lora`: adapters that tokens may have, each beside the modules that its tables name.

    Raises: Unsupported, with the reason.
    """
    try:
        parts = anatomy(model)
    except UnsupportedModel as error:
        raise Unsupported(str(error)) from error
    plan = Builder(model, parts, hidden, lora).plan()
    plan.check()
    return plan


class Builder:
    def __init__(self, model: nn.Module, parts: Anatomy, hidden: bool, lora: AdapterSlots | None = None):
        refuse_wrapped(model)
        self.tables = {} if lora is None else lora.tables
        self.beside: set[str] = set()  # of the tables, those that have records
        if parts.kind != "decoder" or parts.facts is None:
            raise Unsupported(
                f"family {getattr(model.config, 'model_type', '?')} has no row that a plan can follow"
            )
        self.model, self.parts, self.facts, self.hidden = model, parts, parts.facts, hidden
        self.config = model.config.get_text_config(decoder=True)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.named: dict[tuple, int] = {}
        self.ropes: dict[str, int] = {}
        facts = self.facts
        if facts.placement not in _PLACEMENTS:
            raise Unsupported(f"norm placement {facts.placement!r}")
        if facts.residual_from_norm:
            raise Unsupported("the residual is the norm's output")
        if facts.activation not in ACTIVATION_OF:
            raise Unsupported(f"activation {facts.activation!r}")
        if facts.position not in _POSITIONS:
            raise Unsupported(f"positions of kind {facts.position!r}")
        for role in ("type", "project_in"):
            if role in parts.embeddings:
                raise Unsupported(f"embedding with {role} ({parts.embeddings[role]})")
        if parts.project_out:
            raise Unsupported(f"a projection after the layers ({parts.project_out})")

    # -- buffers and weights

    def buffer(self, name: str, width: int, rows: str, **kwargs) -> int:
        key = (name, width, rows, kwargs.get("kind"), kwargs.get("per_row"))
        if kwargs.get("acts") is not None:
            key += (acts_key(kwargs["acts"]),)
        if key not in self.named:
            self.named[key] = len(self.buffers)
            self.buffers.append(Buffer(name, width, rows, **kwargs))
        return self.named[key]

    def width(self, buffer: int) -> int:
        return self.buffers[buffer].width

    def rows(self, buffer: int) -> str:
        return self.buffers[buffer].rows

    def whole(self, buffer: int) -> View:
        return View(buffer, 0, 1, self.width(buffer), self.width(buffer))

    def matrix(self, name: str) -> Matrix:
        return matrix_of(name, self.modules[name])

    # -- records

    def norm(self, name: str, x: View, out: int, layer: int) -> None:
        module, kind = self.modules[name], self.facts.norm
        eps = next(
            (getattr(module, key) for key in ("eps", "variance_epsilon") if hasattr(module, key)), None
        )
        if not isinstance(eps, float):
            raise Unsupported(f"{name} ({type(module).__name__}) has no eps")
        if isinstance(module, nn.LayerNorm) != (kind == "layernorm"):
            raise Unsupported(f"{name} is a {type(module).__name__}, not a {kind} norm")
        self.ops.append(
            Norm(
                name=name,
                layer=layer,
                x=x,
                out=out,
                weight=module.weight,
                bias=getattr(module, "bias", None),
                eps=eps,
                centered=kind == "layernorm",
                unit_offset=kind == "rms1p",
            )
        )

    def matmul(self, x: int, parts: list[tuple[str, Matrix, int]], layer: int) -> None:
        """Products of one input with (name, matrix, output buffer): each kind of input quantized once."""
        quantized: dict[tuple, int] = {}
        scales: list[torch.Tensor] = []
        runs: list[tuple[int, list]] = []
        for part in parts:
            source, apart = x, ""
            if (scale := part[1].input_scale) is not None:
                number = next((i for i, known in enumerate(scales) if torch.equal(known, scale)), len(scales))
                apart = f" scaled {number}" if number else " scaled"
                source = self.buffer("inputs" + apart, part[1].k, self.rows(x))
                if number == len(scales):
                    scales.append(scale)
                    name = part[0] + " input_scale"
                    self.ops.append(Scale(name=name, layer=layer, x=x, out=source, scale=scale))
            key = acts_key(part[1]) and (source, acts_key(part[1]))
            if key is not None:
                if key not in quantized:
                    quantized[key] = self.buffer(
                        "acts" + apart, part[1].k, self.rows(x), kind="acts", acts=part[1]
                    )
                    self.ops.append(Quant(name=part[0] + " input", layer=layer, x=source, out=quantized[key]))
                source = quantized[key]
            same = runs and runs[-1][0] == source and runs[-1][1][0][1].transposed == part[1].transposed
            if same and len(runs[-1][1]) < 3:
                runs[-1][1].append(part)
            else:
                runs.append((source, [part]))
        expands = adapters(self, x, parts, layer)
        for source, run in runs:
            self.ops.append(
                Matmul(
                    name=_joint_name([name for name, _, _ in run]),
                    layer=layer,
                    x=source,
                    outs=tuple(out for _, _, out in run),
                    parts=tuple(matrix for _, matrix, _ in run),
                )
            )
        self.ops += expands

    def add(self, name: str, x: int, y: int, layer: int) -> None:
        self.ops.append(Add(name=name, layer=layer, x=x, y=y))

    def mlp_inputs(self, block: Block, rows: str) -> tuple[list[tuple[str, Matrix, int]], View, View | None]:
        """The first products of a dense MLP, and where gate and up will lie."""
        roles = block.roles
        if "gate_up" in roles:
            matrix = self.matrix(roles["gate_up"])
            if self.facts.gate_up != "halves":
                raise Unsupported(f"{roles['gate_up']}: gate and up {self.facts.gate_up}")
            halves = split_rows(matrix, 2)
            if halves:
                gate, up = (self.buffer(name, matrix.n // 2, rows) for name in ("gate", "up"))
                names = (f"{roles['gate_up']}[gate]", f"{roles['gate_up']}[up]")
                parts = list(zip(names, halves, (gate, up), strict=True))
                return parts, self.whole(gate), self.whole(up)
            out, half = self.buffer("gate_up", matrix.n, rows), matrix.n // 2
            return (
                [(roles["gate_up"], matrix, out)],
                View(out, 0, 1, half, half),
                View(out, half, 1, half, half),
            )
        names = ("gate", "up") if "gate" in roles else ("fc1",)
        if not all(name in roles for name in names):
            raise Unsupported(f"{block.name}: MLP with {', '.join(roles)}")
        parts = [(roles[n], m := self.matrix(roles[n]), self.buffer(n, m.n, rows)) for n in names]
        views = [self.whole(out) for _, _, out in parts]
        return parts, views[0], views[1] if len(views) > 1 else None

    def mlp_rest(self, block: Block, gate: View, up: View | None, rows: str) -> int:
        """Activation and last product of a dense MLP: the buffer of its result."""
        name = block.roles["down"] if "down" in block.roles else block.roles["fc2"]
        kind = activation(self.facts.activation, self.modules[name.rpartition(".")[0]])
        active = self.buffer("active", gate.size, rows)
        self.ops.append(
            Act(name=f"{block.name}.mlp.act", layer=block.index, gate=gate, up=up, out=active, kind=kind)
        )
        matrix = self.matrix(name)
        out = self.buffer("mlp_out", matrix.n, rows)
        self.matmul(active, [(name, matrix, out)], block.index)
        return out

    def mlp(self, block: Block, normed: int) -> int:
        rows = self.rows(normed)
        if block.mlp == "moe":
            return experts(self, block, normed, rows)
        parts, gate, up = self.mlp_inputs(block, rows)
        self.matmul(normed, parts, block.index)
        return self.mlp_rest(block, gate, up, rows)

    def output(self, block: Block, joined: int) -> int:
        matrix = self.matrix(block.roles["o"])
        out = self.buffer("attn_out", matrix.n, self.rows(joined))
        self.matmul(joined, [(block.roles["o"], matrix, out)], block.index)
        return out

    def asked(self, name: str, buffer: int, layer: int) -> int:
        """Keep only the rows asked for."""
        if self.rows(buffer) == ASKED:
            return buffer
        out = self.buffer(self.buffers[buffer].name, self.width(buffer), ASKED)
        self.ops.append(Gather(name=f"{name}.asked", layer=layer, x=buffer, out=out))
        return out

    def block(self, block: Block, x: int, last: bool) -> int:
        placement, norms, layer = self.facts.placement, block.norms, block.index
        hidden = self.width(x)

        def normed(role: str, source: int) -> int:
            if role not in norms:
                raise Unsupported(f"{block.name}: no {role} norm")
            out = self.buffer(f"normed_{role}", hidden, self.rows(source))
            self.norm(norms[role], self.whole(source), out, layer)
            return out

        if placement == "parallel":
            if block.mlp == "moe":
                raise Unsupported(f"{block.name}: experts beside attention")
            attn_in = normed("attn_in", x)
            parts, gate, up = self.mlp_inputs(block, TOKENS)
            if "mlp_in" in norms:
                joined = attention(self, block, attn_in, [])
                attn = self.output(block, joined)
                self.matmul(normed("mlp_in", x), parts, layer)
            else:
                joined = attention(self, block, attn_in, parts)
                attn = self.output(block, joined)
            mlp = self.mlp_rest(block, gate, up, TOKENS)
            self.add(f"{block.name}.residual_attn", x, attn, layer)
            self.add(f"{block.name}.residual_mlp", x, mlp, layer)
            return x

        joined = attention(self, block, x if placement == "post" else normed("attn_in", x), [])
        if last:
            joined, x = self.asked(block.attention, joined, layer), self.asked(block.name, x, layer)
        attn = self.output(block, joined)
        attn = normed("attn_out", attn) if placement == "sandwich" else attn
        self.add(f"{block.name}.residual_attn", x, attn, layer)
        if placement == "post":
            self.norm(norms["attn_out"], self.whole(x), x, layer)
        mlp = self.mlp(block, x if placement == "post" else normed("mlp_in", x))
        mlp = normed("mlp_out", mlp) if placement == "sandwich" else mlp
        self.add(f"{block.name}.residual_mlp", x, mlp, layer)
        if placement == "post":
            self.norm(norms["mlp_out"], self.whole(x), x, layer)
        return x

    def plan(self) -> Plan:
        parts, facts = self.parts, self.facts
        tok = parts.embeddings.get("tok")
        if tok is None or (parts.head is None and not self.hidden):
            raise Unsupported("no token embedding or no head")
        table = matrix_of(tok, self.modules[tok])
        x = self.buffer("x", table.k, TOKENS)
        positions, max_positions = None, 0
        if facts.position == "learned":
            positions = self.modules[parts.embeddings["pos"]].weight
            max_positions = positions.shape[0] - facts.position_offset
        dtype = self.model.dtype
        multiplier = float(torch.tensor(facts.embedding_multiplier).to(dtype))
        self.ops.append(
            Embed(
                name=tok,
                out=x,
                table=table,
                multiplier=multiplier,
                positions=positions,
                position_offset=facts.position_offset,
            )
        )
        if "norm" in parts.embeddings:
            self.norm(parts.embeddings["norm"], self.whole(x), x, -1)
        blocks = parts.blocks
        for block in blocks:
            x = self.block(block, x, block is blocks[-1])
        x = self.asked("last", x, len(blocks) - 1)
        if parts.final_norm:
            out = self.buffer("normed_final", self.width(x), ASKED)
            self.norm(parts.final_norm, self.whole(x), out, -1)
            x = out
        if self.hidden:
            self.ops.append(Logits(name="hidden states", x=x, n=self.width(x)))
        else:
            head = matrix_of(parts.head, self.modules[parts.head])
            plain = not facts.final_softcap and not head.transposed and parts.head not in self.tables
            out = self.buffer("logits", head.n, ASKED, kind="out" if plain else "f32")
            self.matmul(x, [(parts.head, head, out)], -1)
            if not plain:
                self.ops.append(Logits(name="logits", x=out, n=head.n, softcap=facts.final_softcap or 0.0))
        if missed := sorted(self.tables.keys() - self.beside - ({parts.head} if self.hidden else set())):
            raise Unsupported(f"an adapter on {missed[0]}, which no record of the plan multiplies")
        return Plan(
            ops=self.ops,
            buffers=self.buffers,
            vocab=table.n,
            out_width=self.width(x) if self.hidden else head.n,
            dtype=dtype,
            max_positions=max_positions,
        )


def _joint_name(names: list[str]) -> str:
    """a.b.q, a.b.k -> a.b.q+k"""
    if len(names) == 1:
        return names[0]
    owner = names[0].rpartition(".")[0]
    same = all(name.rpartition(".")[0] == owner for name in names)
    return f"{owner}.{'+'.join(n.rpartition('.')[2] for n in names)}" if same else "+".join(names)
