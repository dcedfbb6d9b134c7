"""Pictures of measured tables, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfaccel.errors import PatchError


def bars(rows: list[dict[str, Any]], columns: dict[str, str], title: str, path: str | Path) -> Path:
    """One panel of horizontal bars a column, one bar a row.

    Args:
        rows: dicts with "recipe" and the columns' keys; a missing or None value is left empty.
        columns: key -> heading with its unit.
    Raises: PatchError if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PatchError("a chart needs matplotlib: pip install 'hfaccel[eval]'") from None
    figure = Figure(figsize=(3.4 * len(columns), 0.5 * len(rows) + 1.4), layout="constrained")
    names = [row["recipe"] for row in rows]
    for axis, (key, heading) in zip(
        figure.subplots(1, len(columns), squeeze=False)[0], columns.items(), strict=True
    ):
        values = [row.get(key) or 0.0 for row in rows]
        drawn = axis.barh(names, values, color=[f"C{i}" for i in range(len(rows))])
        axis.bar_label(drawn, [f"{value:,.4g}" if value else "" for value in values], padding=2, fontsize=8)
        axis.set_title(heading, fontsize=9)
        axis.margins(x=0.25)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        if axis is not figure.axes[0]:
            axis.set_yticklabels([])
    figure.suptitle(title, fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path
