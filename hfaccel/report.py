"""The table that says what a patch changed and what runs what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hfaccel.transform import Record

if TYPE_CHECKING:
    from hfaccel.state import State


@dataclass
class Report:
    """What `hfaccel.report(model)` returns; `print` it, or take `to_dict()`.

    Attributes:
        recipe: what was applied.
        records: one a changed module: kind, bytes before and after, layout.
        skipped: module -> why it was left alone.
        model_bytes: all parameters and buffers now; bytes_before: the same before the patch.
        runs: what serves `generate` and `forward`, with the reason where it is a fallback.
        backends: kernel backend of each layout in use.
    """

    recipe: str
    records: list[Record]
    skipped: dict[str, str]
    model_bytes: int
    bytes_before: int
    runs: dict[str, str] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "bytes_before": self.bytes_before,
            "bytes": self.model_bytes,
            "modules": [vars(record) for record in self.records],
            "skipped": self.skipped,
            "runs": self.runs,
            "backends": self.backends,
        }

    def __str__(self) -> str:
        rows = [("modules", "what", "n", "MB before", "MB after")]
        for (pattern, layout), group in _grouped(self.records).items():
            before, after = (sum(getattr(r, key) for r in group) for key in ("bytes_before", "bytes_after"))
            rows.append((pattern, layout, str(len(group)), f"{before / 1e6:.2f}", f"{after / 1e6:.2f}"))
        rows.append(
            ("whole model", "", "", f"{self.bytes_before / 1e6:.2f}", f"{self.model_bytes / 1e6:.2f}")
        )
        out = [f"hfaccel: {self.recipe}", table(rows)]
        out += [f"{name}: {value}" for name, value in self.runs.items()]
        out += [f"kernel of {name}: {value}" for name, value in self.backends.items()]
        left = Counter((starred(name), why) for name, why in self.skipped.items())
        out += [f"left alone: {name}{f' ({n})' * (n > 1)}: {why}" for (name, why), n in left.items()]
        return "\n".join(out)


def layout_of(record: Record) -> str:
    """The grid out of a module's extra_repr, which ends with it."""
    return record.detail.rpartition(", ")[2] or record.transform


def starred(name: str) -> str:
    """A dotted name with block numbers starred out."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _grouped(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by (name with block numbers starred out, layout)."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((starred(record.name), layout_of(record)), []).append(record)
    return groups


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows of text as aligned columns; the first row is the heading, numbers lie right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = (c.rjust(w) if _is_number(c) else c.ljust(w) for c, w in zip(row, widths, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * w for w in widths), *map(line, rows[1:])])


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def model_bytes(model: nn.Module) -> int:
    """Bytes of every parameter and buffer, shared storage counted once."""
    tensors = {
        t.data_ptr(): t for t in [*model.parameters(), *model.buffers()] if t.numel() and not t.is_meta
    }
    return sum(t.numel() * t.element_size() for t in tensors.values())


def build_report(model: nn.Module, state: State) -> Report:
    from hfaccel.quant.linear import QuantExperts, QuantLinear, describe
    from hfaccel_kernels.dispatch import explain as explain_backend

    now, before = model_bytes(model), state.bytes_before
    if before is None:  # loaded packed: what the records say
        before = now + sum(r.bytes_before - r.bytes_after for r in state.records)
    backends = {}
    for module in model.modules():
        if (
            isinstance(module, QuantLinear | QuantExperts)
            and (key := describe(module.layout)) not in backends
        ):
            device = next(module.parameters()).device.type
            backends[key] = explain_backend("qlinear", device, model.dtype, module.layout)
    runs = {"forward": f"the {type(model).__name__} modules", "generate": _generate(model)}
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}  # a saved folder names them sorted
    records = sorted(state.records, key=lambda record: order.get(record.name, len(order)))
    return Report(state.config.describe(), records, state.skipped, now, before, runs, backends)


def _generate(model: nn.Module) -> str:
    """What serves `generate`, and why not something faster."""
    from hfaccel.generate import mixin

    if not hasattr(model, mixin.ATTRIBUTE):
        return f"transformers' own loop: {type(model).__name__} has no runtime"
    found = mixin.explain(model)
    reasons = [f"{name}: {why}" for name, why in (found.get("passed_over") or {}).items()]
    reasons += [f"{why} ({times} calls)" for why, times in found["fallbacks"].items()]
    if found["executor"] is None:
        return f"transformers' own loop: {found['why']}"
    pages = f"INT{found['kv_bits']} pages" if found["kv_bits"] else "pages in the model's dtype"
    measured = found.get("measured") if found["executor"] == "native" else None  # else among the reasons
    said = [f"executor {found['executor']}", pages, measured or "", found["why"] or "", *reasons]
    return "; ".join(filter(None, said))
