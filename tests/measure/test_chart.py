"""Charts: names of points that lie together are readable."""

from itertools import combinations

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hfaccel.measure import chart


def boxes(figure, labels):
    FigureCanvasAgg(figure).draw()
    return [label.get_window_extent().shrunk(0.98, 0.98) for label in labels]


def test_labels_of_points_that_lie_together_do_not_overlap():
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axis = figure.subplots()
    places = [(5.15, 24.34), (5.15, 24.37), (5.05, 24.4), (5.15, 24.34), (8.0, 21.4), (8.0, 31.0)]
    axis.scatter(*zip(*places, strict=True))
    labels = [
        axis.annotate(f"recipe{i} 24.34", at, (6, -3), textcoords="offset points")
        for i, at in enumerate(places)
    ]
    assert any(a.overlaps(b) for a, b in combinations(boxes(figure, labels), 2))
    chart._part(figure, labels)
    parted = boxes(figure, labels)
    assert not any(a.overlaps(b) for a, b in combinations(parted, 2))
    alone = labels[5]
    assert alone.xyann == (6, -3)  # nothing lies under it


def test_a_level_is_a_line_and_the_file_is_written(tmp_path):
    rows = [
        {"recipe": name, "bits": bits, "perplexity": p}
        for name, bits, p in (("original", 32, 21.4), ("int8", 8, 21.5))
    ]
    axes = ("bits", "bits per weight"), ("perplexity", "perplexity")
    file = chart.points(rows, *axes, "title", tmp_path / "chart.png", level="original")
    assert file.read_bytes()[:4] == b"\x89PNG"
