"""sampling.py: the probabilities of transformers' own processors, drawn from a generator of one's own."""

import pytest
import torch
from transformers.generation import logits_process as theirs

from hfaccel.serve.requests import Options, Request
from hfaccel.serve.sampling import candidates, choose, edit

VOCAB = 60


def logits(seed=0):
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def probabilities(row, options):
    ids, weights = candidates(row, options)
    found = torch.zeros(VOCAB)
    found[ids] = weights / weights.sum()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 2.0, "top_k": VOCAB, "top_p": 0.3},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(options):
    options = Options(**options)
    chain = theirs.LogitsProcessorList([theirs.TemperatureLogitsWarper(options.temperature)])
    if options.top_k:
        chain.append(theirs.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(theirs.TopPLogitsWarper(options.top_p))
    if options.min_p:
        chain.append(theirs.MinPLogitsWarper(options.min_p))
    for seed in range(8):
        row = logits(seed)
        if seed > 5:
            row = row.round()  # many are equal
        want = torch.softmax(chain(None, row[None].clone())[0], dim=-1)
        got = probabilities(row, options)
        if options.top_p < 1 and seed > 5:  # which of equal ones the cut takes is a matter of their order
            assert torch.equal(got.sort().values > 0, want.sort().values > 0)
            torch.testing.assert_close(got.sort().values, want.sort().values, atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(got > 0, want > 0)
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_repetition_penalty_and_bias_are_those_of_transformers():
    request = Request([3, 9, 3, 11], Options(repetition_penalty=1.4, logit_bias={7: 2.5, 9: -1.0}))
    request.output += [20, 20, 5]
    row = logits()
    bias = theirs.SequenceBiasLogitsProcessor({(7,): 2.5, (9,): -1.0})
    ids = torch.tensor([request.tokens])
    want = theirs.RepetitionPenaltyLogitsProcessor(1.4)(ids, bias(ids, row[None].clone()))[0]
    edit(row, request)
    torch.testing.assert_close(row, want)


def test_presence_counts_once_and_frequency_each_time():
    """Of the answer, not of the prompt."""
    request = Request([3, 9], Options(presence_penalty=0.5, frequency_penalty=0.25))
    request.output += [20, 20, 5]
    row, want = torch.zeros(VOCAB), torch.zeros(VOCAB)
    want[20], want[5] = -1.0, -0.75
    edit(row, request)
    assert torch.equal(row, want)


def test_greedy_takes_the_first_of_the_best():
    row = torch.zeros(VOCAB)
    row[[9, 30]] = 2.0
    assert choose(row, Request([1])) == 9 == choose(row.bfloat16(), Request([1]))
    assert choose(row, Request([1], Options(logit_bias={30: 0.5}))) == 30
    assert choose(row, Request([9], Options(repetition_penalty=1.5))) == 30
    assert row[30] == 2 and row[0] == 0  # the logits are not changed


def test_draws_follow_the_probabilities_and_repeat():
    row, options = logits(3), Options(temperature=1.5, top_k=6, seed=11)
    first, second = Request([1], options), Request([5, 6], options)
    drawn = [choose(row, first) for _ in range(3000)]
    assert drawn == [choose(row, second) for _ in range(3000)]
    want = probabilities(row, options)
    got = torch.bincount(torch.tensor(drawn), minlength=VOCAB) / len(drawn)
    assert torch.equal(got > 0, want > 0)
    assert (got - want).abs().max() < 4 * (0.25 / len(drawn)) ** 0.5  # four standard deviations at most


def test_neighbours_in_a_batch_and_the_global_seed_do_not_matter():
    batch = torch.stack([logits(n) for n in range(4)])
    options = Options(temperature=1.0, seed=2)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    alone = [choose(row.clone(), Request([1], options)) for row in batch]
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert [choose(row, Request([1], options)) for row in batch] == alone


def test_extremes_are_not_nan():
    row = logits(4) * 1e30
    for temperature in (1e-30, 1e-4, 1e4):
        assert choose(row, Request([1], Options(temperature=temperature, seed=1))) == int(row.argmax())
    row = logits(4)
    assert choose(row, Request([1], Options(temperature=1e-9, seed=1))) == int(row.argmax())


def test_logits_that_are_no_numbers_are_an_error():
    row = logits()
    row[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        choose(row, Request([1], Options(temperature=1.0)))
