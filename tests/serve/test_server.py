"""server.py: prompts of every kind in, answers and streams out, errors to whom they belong."""

import asyncio
import threading

import pytest
import torch

from engines import prompt_of, solo
from hfaccel.generate import gate
from hfaccel.serve.requests import Refused
from hfaccel.serve.server import Answer, Server
from test_readme import _tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('only users') }}{% endif %}"
    "{{ m['content'] }} {% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(model):
    return _tokenizer(model.config.vocab_size)


@pytest.fixture
def server(model, tokenizer):
    with Server(model, tokenizer, pages=60, token_budget=16) as server:
        yield server
        stats = server.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["used_pages"] == stats["cached_pages"]
    assert server.engine.pool.used_pages == 0 and not server._thread.is_alive()


async def collect(server, prompt, **options):
    return [part async for part in server.stream(prompt, **options)]


def test_a_list_of_prompts_gets_answers_in_its_order(server, model):
    prompts = [prompt_of(n, n) for n in (9, 3, 21)]
    answers = server.generate(
        prompts, [{}, {"max_new_tokens": 3}, {"temperature": 1.0, "seed": 4}], max_new_tokens=7
    )
    assert [len(a.ids) for a in answers] == [7, 3, 7]
    assert answers[0].ids == solo(model, prompts[0], 7) and answers[1].ids == solo(model, prompts[1], 3)
    assert server.generate(prompts[2], max_new_tokens=7, temperature=1.0, seed=4).ids == answers[2].ids
    assert all(a.finish_reason == "length" for a in answers)
    assert server.generate([]) == []


def test_one_prompt_of_any_kind_is_one_answer(server, tokenizer):
    text = tokenizer.decode(prompt_of(5, 2))
    same = tokenizer(text)["input_ids"]
    want = server.generate([same], max_new_tokens=4)[0].ids
    for prompt in (text, same, torch.tensor(same), torch.tensor(same).numpy()):
        answer = server.generate(prompt, max_new_tokens=4)
        assert isinstance(answer, Answer) and answer.ids == want
        assert answer.text == tokenizer.decode(want)
    assert answer.usage == {
        "prompt_tokens": len(same),
        "completion_tokens": 4,
        "total_tokens": len(same) + 4,
        "prompt_tokens_details": {"cached_tokens": len(same) - 1},
    }


def test_messages_go_through_the_chat_template(server, tokenizer, monkeypatch):
    words = tokenizer.decode(prompt_of(4, 3))
    message = [{"role": "user", "content": words}]
    with pytest.raises(Refused, match="no chat template"):
        server.generate(message)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    want = server.generate(words, max_new_tokens=4).ids
    assert server.generate(message, max_new_tokens=4).ids == want
    assert [a.ids for a in server.generate([message, message], max_new_tokens=4)] == [want, want]
    with pytest.raises(Refused, match="refuses these messages.*only users"):
        server.generate([{"role": "robot", "content": "x"}])


def test_a_stream_is_the_answer_in_parts(server):
    prompt = prompt_of(6, 5)
    want = server.generate(prompt, max_new_tokens=8)
    parts = asyncio.run(collect(server, prompt, max_new_tokens=8))
    assert [part.token for part in parts] == [*want.ids, None]
    assert "".join(part.text for part in parts) == want.text == parts[-1].answer.text
    assert parts[-1].answer.ids == want.ids and all(part.answer is None for part in parts[:-1])


def test_streams_run_side_by_side(server, model):
    async def both():
        return await asyncio.gather(
            *(collect(server, prompt_of(4 + n, n), max_new_tokens=6) for n in range(5))
        )

    for n, parts in enumerate(asyncio.run(both())):
        assert parts[-1].answer.ids == solo(model, prompt_of(4 + n, n), 6)


def test_a_stop_string_ends_text_and_request(server):
    prompt = prompt_of(6, 5)
    free = server.generate(prompt, max_new_tokens=12)
    words = free.text.split(" ")
    stop = words[4] + " " + words[5][:2]
    answer = server.generate(prompt, max_new_tokens=12, stop=[stop, "never"])
    assert answer.text == free.text[: free.text.index(stop)] and answer.finish_reason == "stop"
    assert len(answer.ids) < 12
    parts = asyncio.run(collect(server, prompt, max_new_tokens=12, stop=stop))
    assert "".join(part.text for part in parts) == answer.text == parts[-1].answer.text


def test_who_leaves_a_stream_cancels_its_request(server):
    async def leave():
        stream = server.stream(prompt_of(5), max_new_tokens=200)
        async for part in stream:
            assert part.token is not None
            break
        await stream.aclose()
        for _ in range(500):
            stats = server.stats()
            if not stats["running"] + stats["waiting"]:
                return server.engine.steps
            await asyncio.sleep(0.01)

    steps = asyncio.run(leave())
    assert steps is not None and steps < 200


def test_streams_left_at_any_point_give_everything_back(model, tokenizer):
    """Case V3: in line, during a long prompt, after some tokens; those who stay get what is theirs."""
    prompts = [prompt_of(5 + 7 * n, n) for n in range(5)]
    want = [solo(model, prompt, 12) for prompt in prompts]

    async def one(server, n):
        leave, got = (n * 5) % 9, []
        stream = server.stream(prompts[n % 5], max_new_tokens=12)
        try:
            async with asyncio.timeout(None if n % 4 else 0.003 * n):
                async for part in stream:
                    got.append(part.token)
                    if n % 3 == 0 and len(got) > leave:
                        break
        except TimeoutError:
            pass
        finally:
            await stream.aclose()
        assert got == [*want[n % 5], None][: len(got)]
        assert len(got) == 13 or n % 3 == 0 or n % 4 == 0
        return len(got)

    async def crowd(server):
        return await asyncio.gather(*(one(server, n) for n in range(40)))

    with Server(model, tokenizer, pages=30, token_budget=8, max_running=4) as server:
        lengths = asyncio.run(crowd(server))
        assert lengths.count(13) >= 20 and len(set(lengths)) > 3
        again = server.generate(prompts, max_new_tokens=12)
        assert [answer.ids for answer in again] == want
        stats = server.stats()
        assert stats["running"] == stats["waiting"] == 0 and stats["used_pages"] == stats["cached_pages"]


def test_one_bad_prompt_refuses_the_call_before_any_runs(server):
    steps = server.engine.steps
    for prompts, options, why in (
        ([prompt_of(4), [999]], {}, "vocabulary"),
        ([prompt_of(4), []], {}, "empty"),
        ([prompt_of(4), prompt_of(230)], {"max_new_tokens": 30}, "can never fit"),
        ([prompt_of(4)], {"temprature": 1.0}, "unknown option 'temprature'.*temperature"),
        ([prompt_of(4)], {"temperature": -1}, "temperature"),
        ([prompt_of(4)], {"stop": ""}, "stop"),
        ([prompt_of(4)], {"stop": 5}, "stop is a string"),
        ([prompt_of(4)], {"stop": ["a"] * 17}, "17 stop strings"),
        ([prompt_of(4)], {"adapter": "mine"}, "not loaded"),
        ([prompt_of(4)], {"options": [{}, {}]}, "1 prompts, but options for 2"),
    ):
        with pytest.raises(Refused, match=why):
            server.generate(prompts, **options)
    assert len(server.generate(prompt_of(4), max_new_tokens=3).ids) == 3
    assert server.engine.steps - steps == 3


def test_a_stream_refuses_at_its_first_step(server):
    with pytest.raises(Refused, match="vocabulary"):
        asyncio.run(collect(server, [999]))


def test_an_error_in_a_step_reaches_who_asked_and_the_server_goes_on(server, model, monkeypatch):
    prompt = prompt_of(7)
    real, broken = server.engine.runner._tensors, iter([True, True])

    def tensors(*args):
        if next(broken, False):
            raise RuntimeError("out of luck")
        return real(*args)

    monkeypatch.setattr(server.engine.runner, "_tensors", tensors)
    with pytest.raises(RuntimeError, match="out of luck"):
        server.generate(prompt, max_new_tokens=4)
    with pytest.raises(RuntimeError, match="out of luck"):
        asyncio.run(collect(server, prompt, max_new_tokens=4))
    assert server.generate(prompt, max_new_tokens=4).ids == solo(model, prompt, 4)


class Panic(BaseException):
    """As tokenizers and llguidance raise them."""


@pytest.mark.parametrize("kind", [AssertionError, Panic])
def test_an_error_of_the_engine_itself_fails_what_it_had_and_no_more(server, monkeypatch, kind):
    real, broken = server.engine._take, iter([True])

    def take(*args):
        if next(broken, False):
            raise kind("a bug")
        return real(*args)

    monkeypatch.setattr(server.engine, "_take", take)
    with pytest.raises(Exception, match="a bug"):
        server.generate(prompt_of(7), max_new_tokens=4)
    assert server.alive
    assert len(server.generate(prompt_of(7), max_new_tokens=4).ids) == 4


def test_closing_ends_who_waits(model, tokenizer):
    server = Server(model, tokenizer, pages=120)
    found = []

    def ask():
        try:
            server.generate(prompt_of(4), max_new_tokens=400)
        except Refused as why:
            found.append(str(why))

    thread = threading.Thread(target=ask)
    thread.start()
    while not server.engine.steps:
        pass
    server.close()
    server.close()
    thread.join(30)
    assert found == ["the request was cancelled"] and server.engine.pool.used_pages == 0
    with pytest.raises(Refused, match="closed"):
        server.generate(prompt_of(4))
    with gate.alone(model, "unpatch"):
        pass


def test_without_a_tokenizer_ids_go_in_and_out(model):
    with Server(model, pages=40) as server:
        assert server.generate(prompt_of(4), max_new_tokens=3).text is None
        parts = asyncio.run(collect(server, prompt_of(4), max_new_tokens=3))
        assert [part.text for part in parts] == [None] * 4 and len(parts[-1].answer.ids) == 3
        for prompt, options in (("text", {}), ([{"role": "user"}], {}), (prompt_of(4), {"stop": "a"})):
            with pytest.raises(Refused, match="tokenizer"):
                server.generate(prompt, **options)


def test_generate_beside_the_server_is_not_disturbed(server, model):
    prompt = prompt_of(8, 1)
    want = solo(model, prompt, 8)
    found = []
    thread = threading.Thread(target=lambda: found.extend(server.generate([prompt] * 3, max_new_tokens=20)))
    thread.start()
    assert all(solo(model, prompt, 8) == want for _ in range(4))
    thread.join(60)
    assert [answer.ids[:8] for answer in found] == [want] * 3
