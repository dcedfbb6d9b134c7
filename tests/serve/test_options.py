"""What an answer may ask for beside its tokens: scores, a least length, no answer but an embedding."""

import pytest
import torch

from engines import prompt_of, solo
from hfaccel.serve.requests import Options, Refused
from hfaccel.serve.server import Server
from test_readme import _tokenizer


@pytest.fixture
def server(model):
    with Server(model, _tokenizer(model.config.vocab_size), pages=60, token_budget=8) as server:
        yield server


def logprobs(model, tokens):
    """Of each next token: the model itself, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.4, "seed": 3}, {"presence_penalty": 2.0}], ids=str)
def test_scores_are_the_models_own_logprobs(server, model, options):
    prompt = prompt_of(11)
    answer = server.generate(prompt, max_new_tokens=6, logprobs=3, **options)
    want = logprobs(model, prompt + answer.ids)[len(prompt) - 1 : -1]
    assert [score.token for score in answer.scores] == answer.ids
    for score, row in zip(answer.scores, want, strict=True):
        assert score.logprob == pytest.approx(row[score.token].item(), abs=1e-4)
        values, tokens = row.topk(3)
        assert [token for token, _ in score.top] == tokens.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert server.generate(prompt, max_new_tokens=2).scores == []


def test_every_token_of_a_prompt_is_scored_cached_or_not(server, model):
    prompt = prompt_of(29)
    server.generate(prompt, max_new_tokens=1)
    beside = [prompt_of(n, n) for n in (5, 13)]
    answer, *others = server.generate([prompt, *beside], [{"prompt_logprobs": 1}, {}, {}], max_new_tokens=3)
    want = logprobs(model, prompt)
    assert [score.token for score in answer.prompt_scores] == prompt[1:] and answer.cached_tokens == 0
    for score, row in zip(answer.prompt_scores, want, strict=False):
        assert score.logprob == pytest.approx(row[score.token].item(), abs=1e-4)
        assert score.top[0][0] == row.argmax()
    assert others[0].prompt_scores == [] and answer.ids == server.generate(prompt, max_new_tokens=3).ids


def test_an_answer_has_its_least_length(server):
    prompt = prompt_of(6, 5)
    free = server.generate(prompt, max_new_tokens=12)
    early = free.ids[2]
    assert len(server.generate(prompt, max_new_tokens=12, stop_ids=[early]).ids) <= 3
    longer = server.generate(prompt, max_new_tokens=12, stop_ids=[early], min_tokens=8)
    assert early not in longer.ids[:8] and len(longer.ids) >= 8
    word = free.text.split(" ")[3]
    held = server.generate(prompt, max_new_tokens=12, stop=word, min_tokens=10)
    assert held.text == free.text[: len(held.text)] and word in held.text and len(held.ids) >= 10
    with pytest.raises(Refused, match="min_tokens 5 is more than max_new_tokens 4"):
        Options(max_new_tokens=4, min_tokens=5)


def test_a_stop_string_may_stay_in_the_text(server):
    free = server.generate(prompt_of(6, 5), max_new_tokens=12)
    word = free.text.split(" ")[3]
    kept = server.generate(prompt_of(6, 5), max_new_tokens=12, stop=word, keep_stop=True)
    assert kept.text == free.text[: free.text.index(word)] + word and kept.stop == word


def test_embeddings_are_means_of_the_last_hidden_states(server, model):
    """Beside answers, in chunks of a step's 8 tokens, with pages of the prompt that are cached already."""
    prompts = [prompt_of(n, n) for n in (3, 21, 8, 21)]
    server.generate(prompts[1], max_new_tokens=1)
    running = server.open(prompts[2], max_new_tokens=40)
    got = server.embed(prompts)
    with torch.no_grad():
        want = torch.stack([model.model(torch.tensor([p])).last_hidden_state[0].mean(0) for p in prompts])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert server.embed(prompts[0]).shape == (1, model.config.hidden_size)
    running.request.done.wait()
    assert running.answer().ids == solo(model, prompts[2], 40)


def test_a_constraint_rules_and_ends_an_answer(server):
    class Even:
        prepared = taken = 0

        def prepare(self):
            self.prepared += 1

        def mask(self, row):
            row[1::2] = -torch.inf

        def take(self, token):
            self.taken += 1
            return self.taken == 5

    rule = Even()
    answer = server.generate(prompt_of(6, 5), max_new_tokens=12, constraint=rule)
    assert len(answer.ids) == 5 and not any(token % 2 for token in answer.ids)
    assert answer.finish_reason == "stop" and rule.prepared == 5


def test_refusals_name_the_option():
    for option, value in [
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("logprobs", 1000),
        ("min_tokens", -1),
        ("logit_bias", {"a": 1}),
        ("stop_ids", ["x"]),
        ("top_p", 0),
    ]:
        with pytest.raises(Refused) as refused:
            Options(**{option: value})
        assert refused.value.option == option
