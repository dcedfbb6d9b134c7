"""draw.py: the choice of `sampling.choose`, of a few candidates."""

import numpy as np
import pytest
import torch

from hfaccel.serve import draw as module
from hfaccel.serve.draw import FEW, draw, wanted
from hfaccel.serve.requests import Options, Request
from hfaccel.serve.sampling import candidates, choose

VOCAB = 400
CLOSED = [  # drawn in the order of `choose`: the same tokens by a seed
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 200, "temperature": 3.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"top_k": VOCAB, "top_p": 0.9},
    {"top_k": 300},  # over MOST
    {"top_p": 0.7},
    {"top_p": 0.99, "temperature": 2.0},
    {"top_p": 1e-6},
    {"top_p": 0.9, "min_p": 0.1},
    {"min_p": 0.05},
    {"min_p": 1e-6},
]


def logits(seed=0, vocab=VOCAB):
    return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def best(row, count):
    """As an executor gives them: equal ones by id."""
    values, ids = row.float().sort(descending=True, stable=True)
    return values[:count].numpy(), ids[:count].numpy()


def asking(seed=0, **options):
    return Request([1], Options(**{"temperature": 0.8, "seed": seed} | options))


@pytest.fixture
def whole_rows(monkeypatch):
    """How often the whole row was looked at."""
    seen = []
    monkeypatch.setattr(module, "choose", lambda row, request: seen.append(1) or choose(row, request))
    return seen


@pytest.mark.parametrize("options", CLOSED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # many are equal
def test_draws_are_those_over_all_logits(options, dtype):
    for seed in range(60):
        row = logits(seed).to(dtype)
        request = asking(seed, **options)
        found = [draw(row, request, *best(row, max(1, wanted(request)))) for _ in range(4)]
        same = asking(seed, **options)
        assert found == [choose(row, same) for _ in range(4)]


@pytest.mark.parametrize("options", [{}, *CLOSED], ids=str)
def test_how_many_were_fetched_does_not_matter(options):
    """Fewer equal ones at the end, or all of them: the same choice."""
    for seed in range(30):
        row = logits(seed).round()
        one, other = asking(seed, **options), asking(seed, **options)
        few, all_of_them = best(row, max(1, wanted(one))), best(row, VOCAB)
        assert [draw(row, one, *few) for _ in range(4)] == [draw(row, other, *all_of_them) for _ in range(4)]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("vocab", [40, VOCAB])
def test_a_temperature_alone_gives_every_token_its_share(temperature, vocab):
    """Inverse transform: equally spaced numbers in place of random ones fall on each token in proportion,
    within one of them."""
    row, count = logits(3, vocab), 20_000
    request = asking(temperature=temperature)
    ids, weights = candidates(row.clone(), request.options)
    values, found = best(row, FEW), np.zeros(vocab)

    numbers = iter(((torch.arange(count, dtype=torch.float64) + 0.5) / count).tolist())
    real = torch.rand
    try:
        torch.rand = lambda *args, **kwargs: torch.tensor([next(numbers)], dtype=torch.float64)
        for _ in range(count):
            found[draw(row, request, *values)] += 1
    finally:
        torch.rand = real
    want = np.zeros(vocab)
    want[ids.numpy()] = count * weights.double().numpy() / weights.double().sum().item()
    assert np.abs(found - want).max() < 1.01


def test_few_look_at_the_whole_row(whole_rows):
    """Where the cut, or the draw, is among the candidates."""
    row = logits(1).mul(3)  # as sure as a language model is
    for options in ({"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.05}, {}):
        request = asking(**options)
        for _ in range(20):
            draw(row, request, *best(row, wanted(request)))
    assert not whole_rows
    for options in ({"top_k": 300}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}):
        request = asking(**options)
        assert wanted(request) == 0
        draw(row, request, *best(row, 1))
    assert len(whole_rows) == 3


def test_many_equal_ones_are_all_in(whole_rows):
    row = torch.zeros(VOCAB)
    row[7] = 1.0
    request = asking(top_k=2)
    found = {draw(row, request, *best(row, wanted(request))) for _ in range(60)}
    assert len(whole_rows) == 60 and len(found) > 20
    row = torch.zeros(VOCAB)
    found = {draw(row, asking(seed), *best(row, FEW)) for seed in range(60)}
    assert len(found) > 20 and max(found) > FEW


def test_extremes():
    row = logits(4) * 1e30
    for temperature in (1e-30, 1e-4, 1e4):
        request = asking(temperature=temperature)
        assert draw(row, request, *best(row, FEW)) == int(row.argmax())
    masked = logits(5)
    masked[3:] = -torch.inf
    found = {draw(masked, asking(seed, temperature=3.0), *best(masked, FEW)) for seed in range(60)}
    assert found == {0, 1, 2}
    assert draw(logits(6), Request([1]), *best(logits(6), 1)) == int(logits(6).argmax())
    for broken in (float("nan"), float("inf")):
        row = logits(7)
        row[3] = broken
        values, ids = row.topk(FEW)
        for options in ({}, {"top_k": 5}, {"top_p": 0.5}):
            with pytest.raises(ValueError, match="not finite"):
                draw(row, asking(**options), values.numpy(), ids.numpy())


def test_the_global_seed_is_neither_read_nor_changed():
    row = logits(8)
    state = torch.random.get_rng_state()
    first = [draw(row, asking(5), *best(row, FEW)) for _ in range(3)]
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert [draw(row, asking(5), *best(row, FEW)) for _ in range(3)] == first
