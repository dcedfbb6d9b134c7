"""quant/allocation.py against every combination."""

from itertools import product

import pytest
import torch

from hfaccel.quant.allocation import allocate


def instances(count: int, units: int = 5):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        sizes = torch.randint(1, 40, (units, 4), generator=generator).sort(1).values
        costs = torch.rand(units, 4, generator=generator).sort(1, descending=True).values
        yield [
            {f"w{j}": (int(s), float(c)) for j, (s, c) in enumerate(zip(row, cost, strict=True))}
            for row, cost in zip(sizes, costs, strict=True)
        ]


def total(options, keys, part):
    return sum(each[key][part] for each, key in zip(options, keys, strict=True))


def test_near_the_best_of_all_combinations():
    exact = 0
    for options in instances(60):
        low = sum(min(size for size, _ in each.values()) for each in options)
        high = sum(max(size for size, _ in each.values()) for each in options)
        for limit in (low, (low + high) // 2, high):
            chosen = allocate(options, limit)
            assert total(options, chosen, 0) <= limit
            fitting = (keys for keys in product(*options) if total(options, keys, 0) <= limit)
            best = min(total(options, keys, 1) for keys in fitting)
            ours = total(options, chosen, 1)
            steps = max(
                max(c for _, c in each.values()) - min(c for _, c in each.values()) for each in options
            )
            assert best - 1e-12 <= ours <= best + steps
            exact += ours <= best + 1e-12
    assert exact > 0.75 * 180


def test_what_costs_more_gets_more():
    options = [{b: (b, scale * 4.0**-b) for b in (2, 3, 4, 8)} for scale in (1, 100, 1)]
    assert allocate(options, 10) == [3, 4, 3]
    assert allocate(options, 6) == [2, 2, 2] and allocate(options, 24) == [8, 8, 8]


def test_choices_that_no_budget_takes():
    """More bytes for no less cost."""
    assert allocate([{"a": (1, 1.0), "b": (2, 1.0), "c": (3, 2.0)}], 10) == ["a"]


def test_nothing_fits():
    with pytest.raises(ValueError, match="1 bytes beyond"):
        allocate([{"a": (2, 1.0)}, {"a": (2, 1.0)}], 3)
