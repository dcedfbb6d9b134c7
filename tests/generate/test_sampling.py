"""Sampling among candidates is sampling over all logits."""

import threading

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from hfaccel.generate import mixin, sampling
from hfaccel_kernels import native
from tiny import ids, tiny

Temperature, TopK, TopP = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
)


@pytest.mark.parametrize(
    "chain, top",
    [
        ([], None),
        ([TopK(7)], 7),
        ([Temperature(0.5), TopK(50), TopP(0.9)], 50),
        ([TopK(9), TopK(4)], 4),
        ([TopP(0.9), TopK(7)], None),  # top-p over all logits is another set
        ([TopK(300)], None),
        ([TopK(7, filter_value=-1e4)], None),
        ([processors.RepetitionPenaltyLogitsProcessor(1.2), TopK(7)], None),
        ([TopK(7), processors.MinPLogitsWarper(0.1)], 7),
    ],
)
def test_which_chains_leave_candidates(chain, top):
    assert sampling.top_k_of(LogitsProcessorList(chain)) == top


class Fixed:
    """Rows whose next logits are given."""

    has_candidates = True

    def __init__(self, logits):
        self.logits = logits

    def candidates(self, tokens, alive, top):
        out = self.logits if alive is None else self.logits[alive]
        values, found = out.sort(dim=-1, descending=True, stable=True)
        return values[:, :top], found[:, :top], out


def distribution(chain, logits):
    return torch.softmax(LogitsProcessorList(chain)(None, logits), -1)


@pytest.mark.parametrize("tied", [False, True])
def test_draws_follow_the_distribution_over_all_logits(tied):
    torch.manual_seed(0)
    logits = torch.randn(2, 64) * 2
    if tied:  # 40 logits share the last place: more than are fetched
        logits[0] = torch.cat([torch.linspace(1, 2, 24), torch.ones(40)])
    chain = [Temperature(1.3), TopK(6), TopP(0.95)] if not tied else [TopK(30)]
    want = distribution(chain, logits)
    rows = 4000
    picker = sampling.Candidates(
        None, logits.repeat(rows, 1), LogitsProcessorList(chain), chain[-1].top_k if tied else 6
    )
    drawn = picker.choose(torch.zeros(2 * rows, 1)).view(rows, 2)
    for row in range(2):
        seen = torch.bincount(drawn[:, row], minlength=64).double()
        kept = want[row] > 0
        assert seen[~kept].sum() == 0
        expected = want[row, kept].double() * rows
        chi2 = ((seen[kept] - expected) ** 2 / expected).sum()
        degrees = int(kept.sum()) - 1
        assert chi2 < degrees + 4 * (2 * degrees) ** 0.5 + 8, (chi2, degrees)


def test_rows_that_ended_keep_their_candidates():
    first, later = torch.randn(3, 100), torch.randn(3, 100)
    rows = Fixed(later)
    picker = sampling.Candidates(rows, first, LogitsProcessorList([TopK(1)]), 1)
    assert torch.equal(picker.choose(torch.zeros(3, 1)), first.argmax(-1))
    picker.advance(torch.zeros(3, dtype=torch.long), [0, 2])
    want = torch.stack([later[0], first[1], later[2]]).argmax(-1)
    assert torch.equal(picker.choose(torch.zeros(3, 1)), want)


@pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")
def test_generate_samples_among_candidates(monkeypatch):
    model = tiny("llama")
    mixin.install(model)
    used = []
    kind = sampling.Candidates
    monkeypatch.setattr(sampling, "Candidates", lambda *args: used.append(1) or kind(*args))
    options = {"max_new_tokens": 8, "do_sample": True, "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    torch.manual_seed(1)
    out = model.generate(ids(2, 5), top_k=20, **options)
    torch.manual_seed(1)
    assert torch.equal(out, model.generate(ids(2, 5), top_k=20, **options)) and used == [1, 1]
    greedy = model.generate(ids(2, 5), **{**options, "do_sample": False})
    assert torch.equal(model.generate(ids(2, 5), top_k=1, **options), greedy)
    model.generate(ids(2, 5), top_k=0, **options)
    model.generate(ids(2, 5), top_k=5, repetition_penalty=1.1, **options)
    assert len(used) == 3
    assert mixin.runner_of(model).pool.used_pages == 0


def test_a_row_that_ended_with_tied_logits_does_not_force_the_vocabulary():
    first = torch.randn(2, 100)
    first[1] = 1.0  # all tied
    picker = sampling.Candidates(Fixed(torch.randn(2, 100)), first, LogitsProcessorList([TopK(3)]), 3)
    picker.advance(torch.zeros(2, dtype=torch.long), [0])
    picker.logits = None  # nobody may look at all of them
    picker.choose(torch.zeros(2, 1))


def test_sampling_goes_on_when_the_executor_changes_under_it(monkeypatch):
    """Another thread's call has the runner take another executor, one without candidates."""
    model = tiny("llama")
    mixin.install(model)

    class Meddling:
        puts = 0

        def put(self, tokens):
            self.puts += 1
            if self.puts == 3:
                monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")
                other = threading.Thread(
                    target=model.generate, args=(ids(1, 4),), kwargs={"max_new_tokens": 2}
                )
                other.start()
                other.join()

        def end(self): ...

    options = dict(do_sample=True, top_k=5, max_new_tokens=8)
    out = model.generate(ids(1, 6), streamer=Meddling(), **options)
    assert out.shape == (1, 14) and mixin.runner_of(model).executor.name == "modules"
