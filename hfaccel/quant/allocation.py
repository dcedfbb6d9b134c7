"""One choice of several for every unit: the least cost within a number of bytes.

From the fewest bytes on, whichever step to the next point of a unit's lower convex hull saves the most cost a
byte is taken, if it fits; what is left at the end goes to the largest savings that fit, off the hulls too.
With many units of similar size that is within one step of the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def allocate(options: Sequence[dict[Any, tuple[int, float]]], limit: int) -> list[Any]:
    """One key of every dict, so that the sum of bytes is at most `limit` and that of costs about the least.

    Args:
        options: key -> (bytes, cost), of each unit.
    Raises: ValueError if the smallest ones exceed the limit.
    """
    hulls = [_hull(each) for each in options]
    at = [0] * len(hulls)
    left = limit - sum(options[i][hull[0]][0] for i, hull in enumerate(hulls))
    if left < 0:
        raise ValueError(f"{-left} bytes beyond the limit at the least")
    steps = []
    for i, hull in enumerate(hulls):
        for place, (key, following) in enumerate(zip(hull, hull[1:], strict=False), 1):
            (size, cost), (more, less) = options[i][key], options[i][following]
            steps.append(((cost - less) / (more - size), i, place, more - size))
    # Slopes fall along a hull, so that this order takes the steps of each unit one after the other.
    for _, i, place, size in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if at[i] == place - 1 and size <= left:
            at[i], left = place, left - size
    chosen = [hull[place] for hull, place in zip(hulls, at, strict=True)]
    return _fill(options, chosen, left)


def _hull(options: dict[Any, tuple[int, float]]) -> list[Any]:
    """Keys from the fewest bytes on, each better per byte than what it jumps over."""
    hull: list[Any] = []
    for key in sorted(options, key=options.get):
        size, cost = options[key]
        if hull and cost >= options[hull[-1]][1]:
            continue
        while len(hull) > 1:
            (s0, c0), (s1, c1) = options[hull[-2]], options[hull[-1]]
            if (c0 - c1) * (size - s1) > (c1 - cost) * (s1 - s0):
                break
            hull.pop()
        hull.append(key)
    return hull


def _fill(options: Sequence[dict[Any, tuple[int, float]]], chosen: list[Any], left: int) -> list[Any]:
    """Spend what is left, also on options that no hull has."""
    while True:
        best, gain = None, 0.0
        for i, (each, key) in enumerate(zip(options, chosen, strict=True)):
            size, cost = each[key]
            for other, (more, less) in each.items():
                if 0 < more - size <= left and cost - less > gain:
                    best, gain = (i, other, more - size), cost - less
        if best is None:
            return chosen
        i, other, size = best
        chosen[i], left = other, left - size
