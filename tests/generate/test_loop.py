"""The plain greedy loop gives what the full one gives."""

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hfaccel.generate import loop, mixin
from tiny import ids, tiny


class Never(StoppingCriteria):
    """Stops nothing, but is not one of the two criteria that the plain loop knows."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Tokens:
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen += value.flatten().tolist()

    def end(self):
        self.seen.append("end")


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ends", ["none", "one", "list"])
def test_plain_greedy_is_the_full_loop(rows, ends, monkeypatch):
    model = tiny("llama")
    mixin.install(model)
    prompts = ids(rows, 9)
    free = model.generate(prompts, max_new_tokens=12, do_sample=False)
    chosen = {"none": None, "one": int(free[0, 13]), "list": [int(free[0, 13]), int(free[-1, 11])]}[ends]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": chosen, "pad_token_id": 0}
    calls = []
    greedy = loop.greedy
    monkeypatch.setattr(loop, "greedy", lambda *args: calls.append(1) or greedy(*args))
    plain = model.generate(prompts, **options)
    full = model.generate(prompts, stopping_criteria=StoppingCriteriaList([Never()]), **options)
    assert calls == [1]
    assert torch.equal(plain, full)
    if chosen is not None:
        assert plain.shape[1] < free.shape[1] or rows > 1
    if rows == 1:
        both = []
        for extra in ({}, {"stopping_criteria": StoppingCriteriaList([Never()])}):
            both.append(Tokens())
            model.generate(prompts, streamer=both[-1], **options, **extra)
        assert both[0].seen == both[1].seen and both[0].seen[-1] == "end"
    assert mixin.runner_of(model).pool.used_pages == 0


def test_a_processor_or_scores_take_the_full_loop(monkeypatch):
    model = tiny("llama")
    mixin.install(model)
    monkeypatch.setattr(loop, "greedy", lambda *args: pytest.fail("the plain loop ran"))
    common = {"max_new_tokens": 3, "do_sample": False}
    banned = LogitsProcessorList([lambda seen, scores: scores.index_fill(1, torch.arange(200), -1e9)])
    assert (model.generate(ids(1, 5), logits_processor=banned, **common)[0, 5:] >= 200).all()
    out = model.generate(ids(1, 5), return_dict_in_generate=True, output_scores=True, **common)
    assert len(out.scores) == 3
    model.generate(ids(1, 5), max_new_tokens=3, do_sample=True)


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_of_several_limits_and_all_end_tokens_count(order):
    """Criteria of the caller beside those that generate makes: transformers asks each."""
    plain, model = tiny("llama"), tiny("llama")
    mixin.install(model)
    free = plain.generate(ids(1, 5), max_new_tokens=9, do_sample=False)[0]
    ends = [EosTokenCriteria(int(free[8])), EosTokenCriteria(255)][::order]
    for extra in ([MaxLengthCriteria(7), MaxLengthCriteria(20)][::order], ends):
        want, got = (
            one.generate(
                ids(1, 5), max_new_tokens=9, do_sample=False, stopping_criteria=StoppingCriteriaList(extra)
            )
            for one in (plain, model)
        )
        assert torch.equal(got, want) and want.shape[1] < 14


def test_a_limit_of_the_callers_leaves_room_in_the_table_of_positions():
    plain, model = tiny("gpt2", max_position_embeddings=16), tiny("gpt2", max_position_embeddings=16)
    mixin.install(model)
    short = StoppingCriteriaList([MaxLengthCriteria(12)])
    options = dict(max_new_tokens=20, do_sample=False, stopping_criteria=short)
    assert torch.equal(model.generate(ids(1, 8), **options), plain.generate(ids(1, 8), **options))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_result_is_int64_and_owns_what_it_shows(dtype):
    plain, model = tiny("llama"), tiny("llama")
    mixin.install(model)
    x = ids(2, 6).to(dtype)
    free = plain.generate(x, max_new_tokens=8, do_sample=False)
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=free[:, 8].tolist(), pad_token_id=0)
    want, got = (one.generate(x, **options) for one in (plain, model))
    assert torch.equal(got, want) and got.dtype == want.dtype == torch.int64
    assert got.shape[1] < 14 and got.is_contiguous() and got.untyped_storage().nbytes() == got.nbytes
