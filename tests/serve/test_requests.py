"""requests.py: what is refused before it costs a page, and how a request comes to an end."""

import math

import pytest
import torch

from hfaccel.errors import PatchError
from hfaccel.serve.requests import Options, Refused, Request, State

ROOM = {"pool_pages": 4, "page_tokens": 4, "vocab": 50, "positions": None}


@pytest.mark.parametrize(
    "option, values",
    [
        ("max_new_tokens", (0, -1, 1.5, True, "3", None)),
        ("temperature", (-1, math.nan, math.inf, "hot", None, True)),
        ("top_k", (-1, 2.0)),
        ("top_p", (0, 1.1, -0.5, math.nan)),
        ("min_p", (-0.1, 2)),
        ("repetition_penalty", (0, -1, math.nan)),
        ("presence_penalty", (math.inf, math.nan, "x")),
        ("frequency_penalty", (-math.inf, None)),
        ("logit_bias", ({-1: 1.0}, {"a": 1}, {3: math.nan}, [3])),
        ("seed", (2**64, 1.5, "x")),
        ("stop_ids", (5, (-1,), ("a",))),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(option, values):
    for value in values:
        with pytest.raises(Refused, match=option):
            Options(**{option: value})


def test_a_refusal_is_an_error_of_the_user():
    assert issubclass(Refused, PatchError) and issubclass(Refused, ValueError)


@pytest.mark.parametrize(
    "prompt", [[], "text", b"ids", 5, None, [1.0], [True], ["a"], torch.zeros(2, 3).long(), torch.zeros(3)]
)
def test_a_prompt_is_token_ids(prompt):
    with pytest.raises(Refused, match="prompt"):
        Request(prompt)


def test_tensors_and_lists_are_the_same_prompt():
    want = [3, 4, 5]
    for prompt in (want, tuple(want), torch.tensor(want), torch.tensor([want]), torch.tensor(want).numpy()):
        assert Request(prompt).prompt == want
    mine = [1, 2]
    request = Request(mine)
    mine.append(3)
    assert request.prompt == [1, 2]


def test_parts_are_cut_out_of_prompt_and_answer():
    request = Request([1, 2, 3])
    request.output += [4, 5]
    for at in range(5):
        for count in range(1, 6 - at):
            assert request.part(at, count) == request.tokens[at : at + count]


def test_what_can_never_fit_is_refused_with_both_numbers():
    """16 slots: the last token of an answer needs none."""
    Request([1] * 10, Options(max_new_tokens=7)).check(**ROOM)
    with pytest.raises(Refused, match=r"10 tokens and 8 new ones need 5 pages.*there are 4"):
        Request([1] * 10, Options(max_new_tokens=8)).check(**ROOM)
    Request([1] * 6, Options(max_new_tokens=3)).check(**ROOM | {"positions": 8})
    with pytest.raises(Refused, match="learned positions"):
        Request([1] * 6, Options(max_new_tokens=4)).check(**ROOM | {"positions": 8})


def test_tokens_outside_the_vocabulary_are_refused():
    for prompt in ([50], [1, -1]):
        with pytest.raises(Refused, match=f"token id {prompt[-1]} is not"):
            Request(prompt).check(**ROOM)
    for options in (Options(logit_bias={50: 1.0}), Options(stop_ids=[50])):
        with pytest.raises(Refused, match="50 of the options"):
            Request([1], options).check(**ROOM)


def test_generators_are_their_own():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    a, b = (Request([1], Options(seed=3)).generator for _ in range(2))
    assert torch.equal(torch.rand(4, generator=a), torch.rand(4, generator=b))
    torch.manual_seed(7)
    free = [torch.rand(4, generator=Request([1]).generator)]
    torch.manual_seed(7)
    free.append(torch.rand(4, generator=Request([1]).generator))
    assert not torch.equal(*free)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_end_is_told_once():
    seen = []
    request = Request([1], listener=lambda r, token: seen.append((token, r.state)))
    request.end(State.FINISHED, "stop")
    request.end(State.CANCELLED, "cancelled")
    assert seen == [(None, State.FINISHED)] and request.finish_reason == "stop" and request.done.is_set()


def test_a_listener_that_raises_at_the_end_does_not_keep_it_from_ending():
    request = Request([1], listener=lambda *_: 1 / 0)
    request.end(State.FINISHED, "length")
    assert request.done.is_set() and isinstance(request.error, ZeroDivisionError)
    assert request.state is State.FINISHED
