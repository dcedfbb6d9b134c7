"""pace.py: prompts beside decodes, by what steps took."""

import pytest

from hfaccel.errors import PatchError
from hfaccel.serve.pace import FIRST, LEAST, Pace
from hfaccel.serve.scheduler import Limits


def test_as_many_tokens_as_double_the_step():
    pace = Pace(2.0)
    assert pace.tokens(512) == FIRST and pace.tokens(8) == 8
    pace.took(0.0055, 4, 0)
    pace.took(0.0375, 4, 32)  # 1 ms a token
    assert pace.tokens(512) == LEAST  # 5 would do
    for _ in range(60):
        pace.took(0.080, 40, 0)
    assert pace.tokens(512) == 79 and pace.tokens(50) == 50
    for _ in range(200):
        pace.took(0.160, 40, 160)  # half a millisecond a token
    assert pace.tokens(512) == 159


def test_slower_steps_are_believed_sooner():
    pace = Pace(2.0)
    pace.took(0.1, 4, 0)
    pace.took(0.2, 4, 100)  # 1 ms a token
    pace.took(0.4, 4, 100)  # 3 ms: half of it counts
    assert pace.tokens(512) == 50
    pace.took(0.2, 4, 100)  # 1 ms: a tenth of it does
    assert pace.tokens(512) == 52


def test_a_crowd_has_its_share_by_heads():
    pace = Pace(2.0)
    pace.took(0.1, 4, 0)
    pace.took(0.2, 4, 10)
    assert pace.tokens(512, decodes=8, prompts=0) == 10
    assert pace.tokens(512, decodes=8, prompts=1) == 10  # one long prompt is no crowd
    assert pace.tokens(512, decodes=8, prompts=9) == 256
    assert pace.tokens(512, decodes=1, prompts=50) == 501


def test_what_says_nothing():
    pace = Pace(3.0)
    pace.took(0.5, 0, 512)  # no decode: whatever it took
    pace.took(0.5, 3, 64)  # nothing to compare it with
    assert pace.tokens(512) == FIRST
    pace.took(0.5, 3, 0)
    pace.took(0.4, 3, 64)  # faster than without: prompts cost nothing here
    assert pace.tokens(512) == 512
    assert Pace(None).tokens(512) == 512


@pytest.mark.parametrize("wrong", [1.0, 0, float("nan"), float("inf")])
def test_bad_stretches(wrong):
    with pytest.raises(PatchError, match="stretch"):
        Limits(stretch=wrong)
