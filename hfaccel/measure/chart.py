"""Pictures of measured tables, as PNG or what else matplotlib writes."""

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
    figure = _figure(figsize=(3.4 * len(columns), 0.5 * len(rows) + 1.4), layout="constrained")
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
    return _save(figure, title, path)


def points(
    rows: list[dict[str, Any]],
    x: tuple[str, str],
    y: tuple[str, str],
    title: str,
    path: str | Path,
    level: str | None = None,
) -> Path:
    """One named point a row: (key, heading with its unit) of both axes; a row without one is left out.

    Args:
        level: the row of this name is a line at its height instead, as a reference far to the right would be.
    Raises: PatchError if matplotlib is missing, or no row has both.
    """
    drawn = [row for row in rows if row.get(x[0]) is not None and row.get(y[0]) is not None]
    if not drawn:
        raise PatchError(f"no row has both {x[1]} and {y[1]}: nothing to draw")
    figure = _figure(figsize=(6.4, 4.4), layout="constrained")
    axis, labels = figure.subplots(), []
    for i, row in enumerate(drawn):
        name = f"{row['recipe']} {row[y[0]]:.2f}"
        if row["recipe"] == level and len(drawn) > 1:
            axis.axhline(row[y[0]], color="gray", linestyle="--")
            axis.annotate(
                name, (0, row[y[0]]), (4, 4), ("axes fraction", "data"), "offset points", fontsize=8
            )
            continue
        axis.scatter(row[x[0]], row[y[0]], color=f"C{i % 10}", zorder=3)
        labels.append(
            axis.annotate(name, (row[x[0]], row[y[0]]), (6, -3), textcoords="offset points", fontsize=8)
        )
    axis.set_xlabel(x[1])
    axis.set_ylabel(y[1])
    axis.margins(x=0.15, y=0.12)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    _part(figure, labels)
    return _save(figure, title, path)


def _part(figure: Any, labels: list) -> None:
    """Move labels up, from the lowest on, until none lies over another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()  # the layout, by which points have places
    placed: list = []
    for label in sorted(labels, key=lambda each: each.xy[1]):
        box = label.get_window_extent()
        for other in sorted(placed, key=lambda each: each.y0):
            if box.overlaps(other):
                box = box.translated(0, other.y1 - box.y0)
        up = (box.y0 - label.get_window_extent().y0) * 72 / figure.dpi
        label.xyann = (label.xyann[0], label.xyann[1] + up)
        placed.append(box)


def require() -> Any:
    """What draws. Raises: PatchError where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PatchError("a chart needs matplotlib: pip install 'hfaccel[eval]'") from None
    return Figure


def check(path: str | Path) -> None:
    """Refuse, before anything is measured, a file that no picture can be written to. Raises: PatchError."""
    from hfaccel.saving import check_writable

    require()
    from matplotlib.backend_bases import FigureCanvasBase

    path, kinds = Path(path), FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise PatchError(f"{path}: a chart's file ends in .{', .'.join(sorted(kinds))}")
    if path.is_dir():
        raise PatchError(f"{path} is a folder, not a file to write a chart into")
    check_writable(path)


def _figure(**options: Any) -> Any:
    return require()(**options)


def _save(figure: Any, title: str, path: str | Path) -> Path:
    figure.suptitle(title, fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path
