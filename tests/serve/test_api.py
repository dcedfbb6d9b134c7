"""api.py: the real `openai` client, and bare HTTP, against `hfaccel serve` in a process of its own."""

import json
import math
import socket
import threading
import time

import httpx
import openai
import pytest

from live import CONTEXT_TOKENS, Live, folder
from lora_folders import adapter
from tiny import tiny

KEY = "a-key"
MESSAGES = [{"role": "user", "content": "hello the world"}]
LONG = "the then there this that with other are era hello world " * 3  # some pages


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    for name, seed in (("one", 1), ("two", 2)):
        adapter(tiny("TL"), root / "adapters" / name, seed=seed)
    args = "--name tl --recipe int8 --pages 700 --max-running 8 --max-queue 8 --max-body 100000".split()
    places = ["--lora", f"one={root / 'adapters' / 'one'}", "--lora-dir", str(root / "adapters")]
    live = Live(folder(root / "model"), *args, "--api-key", KEY, *places)
    live.root = root
    yield live
    assert live.stop() == 0


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def http(live):
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=live.url, headers=headers, timeout=30) as http:
        yield http


def gauges(http):
    """Name -> value of the metrics without labels of their own."""
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def settled(http, within=1.0):
    """Whether nothing runs or waits any more, soon, and no page is held but by the cache."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        now = gauges(http)
        used = round(now["vllm:kv_cache_usage_perc"] * now["hfaccel:kv_pages"])
        busy = now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"]
        if not busy and used == now["hfaccel:kv_pages_cached"]:
            return True
        time.sleep(0.02)
    return False


# -- completions


def test_a_completion_is_the_same_whole_and_streamed(client):
    asked = {"model": "tl", "prompt": "the then", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == whole.choices[0].finish_reason == "length" and set(reasons[:-1]) <= {None}
    assert whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20
    assert all(chunk.usage is None for chunk in chunks) and len({chunk.id for chunk in chunks}) == 1


def test_many_prompts_and_choices_have_their_index(client):
    prompts = ["hello", LONG, "era"]
    asked = {"model": "tl", "max_tokens": 6, "seed": 5, "temperature": 1.0}
    got = client.completions.create(**asked, prompt=prompts, n=2)
    assert [choice.index for choice in got.choices] == list(range(6))
    for at, prompt in enumerate(prompts):
        for n in range(2):
            alone = client.completions.create(**asked | {"seed": 5 + n}, prompt=prompt)
            assert got.choices[2 * at + n].text == alone.choices[0].text
    streamed = [""] * 6
    for chunk in client.completions.create(**asked, prompt=prompts, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in got.choices]


def test_choices_share_their_prompt(client, http):
    before = gauges(http)
    prompt = LONG + "café " * 9
    client.completions.create(model="tl", prompt=prompt, max_tokens=3, n=4)
    after = gauges(http)
    found = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    asked = after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"]
    assert found > 0.6 * asked  # three of four, but their last page


def test_token_ids_are_prompts(client, http):
    ids = http.post("/tokenize", json={"prompt": "hello the"}).json()["tokens"]
    asked = {"model": "tl", "max_tokens": 5, "temperature": 0}
    texts = client.completions.create(**asked, prompt="hello the")
    assert client.completions.create(**asked, prompt=ids).choices[0].text == texts.choices[0].text
    both = client.completions.create(**asked, prompt=[ids, ids])
    assert [choice.text for choice in both.choices] == [texts.choices[0].text] * 2
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hello the"}


def test_a_prompt_is_scored_and_echoed(client):
    asked = {"model": "tl", "prompt": "hello the", "temperature": 0, "logprobs": 2}
    got = client.completions.create(**asked, max_tokens=4, echo=True).choices[0]
    alone = client.completions.create(**asked, max_tokens=4).choices[0]
    assert got.text == "hello the" + alone.text
    known = len(got.logprobs.tokens) - 4
    assert got.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in got.logprobs.token_logprobs[1:])
    assert got.logprobs.token_logprobs[known:] == pytest.approx(alone.logprobs.token_logprobs, abs=1e-3)
    assert alone.logprobs.text_offset[0] == 0 and got.logprobs.text_offset[known] == len("hello the")
    assert all(len(top) == 2 for top in alone.logprobs.top_logprobs)
    none = client.completions.create(**asked, max_tokens=0, echo=True)
    assert none.choices[0].text == "hello the" and none.usage.completion_tokens == 0
    assert none.choices[0].logprobs.token_logprobs[1:] == got.logprobs.token_logprobs[1:known]
    parts = list(client.completions.create(**asked, max_tokens=4, echo=True, stream=True))
    assert "".join(part.choices[0].text for part in parts) == got.text
    values = [
        v for part in parts if part.choices[0].logprobs for v in part.choices[0].logprobs.token_logprobs
    ]
    assert values[1:] == pytest.approx(got.logprobs.token_logprobs[1:], abs=1e-3)


def test_the_best_of_some_are_the_likeliest(client):
    asked = {"model": "tl", "prompt": "hello", "max_tokens": 6, "seed": 1, "temperature": 1.5, "logprobs": 0}
    every = client.completions.create(**asked, n=6).choices
    means = {choice.text: sum(choice.logprobs.token_logprobs) / 6 for choice in every}
    want = sorted(means, key=means.get, reverse=True)[:2]
    got = client.completions.create(**asked, n=2, best_of=6)
    assert [choice.text for choice in got.choices] == want and [c.index for c in got.choices] == [0, 1]
    assert got.usage.completion_tokens == 36


def test_stop_strings_and_least_lengths(client):
    asked = {"model": "tl", "prompt": "era this", "temperature": 0, "max_tokens": 40}
    free = client.completions.create(**asked).choices[0].text
    stop = free[8:11]
    cut = client.completions.create(**asked, stop=[stop, "never"]).choices[0]
    assert cut.text == free[: free.index(stop)] and cut.finish_reason == "stop" and cut.stop_reason == stop
    parts = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(part.choices[0].text for part in parts) == cut.text
    assert parts[-1].choices[0].finish_reason == "stop"
    kept = client.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == cut.text + stop
    longer = client.completions.create(**asked, stop=stop, extra_body={"min_tokens": 39})
    assert longer.usage.completion_tokens >= 39


def test_bias_and_penalties_reach_the_engine(client, http):
    token = http.post("/tokenize", json={"prompt": "x"}).json()["tokens"][0]
    asked = {"model": "tl", "prompt": "era", "temperature": 0, "max_tokens": 5}
    assert client.completions.create(**asked, logit_bias={str(token): 100}).choices[0].text == "xxxxx"
    varied = client.completions.create(
        **asked, logit_bias={str(token): 14}, frequency_penalty=2, presence_penalty=2
    )
    assert varied.choices[0].text != "xxxxx"


# -- chat


def test_a_chat_whole_and_streamed(client):
    asked = {"model": "tl", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content and whole.choices[0].finish_reason == "length"
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any(chunk.choices[0].delta.role for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    again = [*MESSAGES, message.model_dump(), {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert client.chat.completions.create(model="tl", messages=again, max_tokens=2).choices[0].message


def test_chat_logprobs_name_tokens_and_bytes(client):
    asked = {"model": "tl", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    got = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, n=2)
    for choice in got.choices:
        assert len(choice.logprobs.content) == 8
        for one in choice.logprobs.content:
            assert len(one.top_logprobs) == 3 and one.logprob <= one.top_logprobs[0].logprob <= 0
            assert one.token == one.top_logprobs[0].token  # greedy
    raw = b"".join(bytes(one.bytes) for one in got.choices[0].logprobs.content)
    assert raw.decode(errors="replace") == got.choices[0].message.content
    chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    streamed = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert streamed == got.choices[0].logprobs.content


def test_a_stream_ends_once_with_done(http):
    body = {"model": "tl", "messages": MESSAGES, "stream": True, "max_tokens": 3, "n": 2}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    chunks = [json.loads(text) for text in events[:-1]]
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]


# -- the others


def test_embeddings_are_numbers_or_base64(client, http):
    texts = ["hello the world", "café", LONG]
    got = client.embeddings.create(model="tl", input=texts)  # base64, unless it is asked for otherwise
    plain = client.embeddings.create(model="tl", input=texts, encoding_format="float")
    for one, other in zip(got.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-5) and len(one.embedding) == 64
    alone = client.embeddings.create(model="tl", input="café", encoding_format="float").data[0].embedding
    assert alone == pytest.approx(plain.data[1].embedding, abs=1e-4)
    body = {"model": "tl", "input": "café", "normalize": True}
    unit = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert math.hypot(*unit) == pytest.approx(1, abs=1e-5)


def test_more_embeddings_than_run_and_wait(client):
    texts = [f"{n} the world" for n in range(600)]
    got = client.embeddings.create(model="tl", input=texts)
    assert [one.index for one in got.data] == list(range(600))
    alone = client.embeddings.create(model="tl", input=texts[599]).data[0].embedding
    assert got.data[599].embedding == pytest.approx(alone, abs=1e-4)
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.embeddings.create(model="tl", input=["a"] * 2049)


def test_models_health_version_and_metrics(client, http):
    assert [model.id for model in client.models.list()] == ["tl", "one"]
    assert client.models.retrieve("tl").id == "tl"
    assert http.get("/health").json() == {"status": "ok"} and http.get("/version").json()["version"]
    before = gauges(http)
    client.completions.create(model="tl", prompt="hello", max_tokens=7)
    after = gauges(http)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:generation_tokens_total"] == 7
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown[f"vllm:{name}_count"] == 1 and 0 <= grown[f"vllm:{name}_sum"] < 20


# -- refusals


BAD = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, 512]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x " * CONTEXT_TOKENS}, "prompt"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": True}, "n"),
    ({"n": 17}, "n"),  # more than run and wait at once
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"priority": 1}, "priority"),  # under fcfs it would not count
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 99}, "stop"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logprobs": 1000}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"seed": 1.5}, "seed"),
    ({"suffix": "x"}, "suffix"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"temprature": 1}, "temprature"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"stop_token_ids": [600]}, "stop_token_ids"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wrong", "field"), BAD, ids=lambda x: str(x)[:40])
def test_what_is_wrong_is_named(http, wrong, field, stream):
    body = {"model": "tl", "prompt": "hello", "max_tokens": 2, "stream": stream} | wrong
    if wrong.get("stream_options"):
        body["stream"] = False
    answer = http.post(
        "/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", error
    assert error["param"] == field and error["message"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": "x " * CONTEXT_TOKENS}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_wrong_in_a_chat_is_named(http, wrong, field):
    answer = http.post("/v1/chat/completions", json={"model": "tl", "messages": MESSAGES} | wrong)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_too_long_a_prompt_is_told_both_numbers(client):
    for length in (CONTEXT_TOKENS, CONTEXT_TOKENS + 1, 10 * CONTEXT_TOKENS):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tl", prompt=[5] * length, max_tokens=1)
        assert str(CONTEXT_TOKENS) in str(refused.value) and f" {length} " in str(refused.value)
        assert refused.value.code == "context_length_exceeded"
    last = client.completions.create(model="tl", prompt=[5] * (CONTEXT_TOKENS - 1), max_tokens=10**9)
    assert last.usage.completion_tokens == 1 and last.choices[0].finish_reason == "length"


def test_bodies_that_are_none(http):
    kind = {"content-type": "application/json"}
    for body in (b"", b"{", b"[]", b"null", b"7", b'"x"', b'{"model": "\xff"}', b"\xff\xfe", b"[" * 50_000):
        answer = http.post("/v1/completions", content=body, headers=kind)
        assert answer.status_code == 400 and answer.json()["error"]["message"], body[:20]
    lone = b'{"model": "tl", "prompt": "\\ud800"}'
    assert http.post("/v1/completions", content=lone, headers=kind).json()["error"]["param"] == "prompt"
    plain = http.post("/v1/completions", content=b'{"model": "tl"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 400  # what a page of another site may send unasked
    long = http.post("/v1/completions", json={"model": "tl", "prompt": "x" * 200_000})
    assert long.status_code == 413 and long.json()["error"]["code"] == "body_too_long"
    chunked = http.post("/v1/completions", content=iter([b"x" * 60_000] * 3), headers=kind)
    assert chunked.status_code == 413
    assert http.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405


def test_keys_and_unknown_models(live, client, http):
    for key in ("wrong", "a-ke", "a-keys", "ä"):
        given = {"authorization": f"Bearer {key}".encode()}
        answer = httpx.get(live.url + "/v1/models", headers=given)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.post(live.url + "/tokenize", json={"prompt": "x"}).status_code == 401
    assert httpx.get(live.url + "/health").status_code == httpx.get(live.url + "/metrics").status_code == 200
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="gpt-4", prompt="x")
    assert refused.value.code == "model_not_found" and "tl" in str(refused.value)


def test_adapters_come_from_their_folder_alone(live, http):
    (live.root / "adapters" / "empty").mkdir(exist_ok=True)
    link = live.root / "adapters" / "link"
    if not link.exists():
        link.symlink_to(live.root / "model")

    def load(path, name="a"):
        return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})

    for path in ("../model", "/etc", str(live.root / "model"), "link", "", ".", "a\0b"):
        answer = load(path)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_path", path
    assert load("missing").status_code == load("x" * 300).status_code == 404
    assert load("empty").status_code == 400  # no adapter in it
    assert load("empty", "tl").json()["error"]["param"] == "lora_name"
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert gone.status_code == 404 and gone.json()["error"]["param"] == "lora_name"


def test_an_adapter_is_a_model_by_its_name(client, http):
    asked = {"prompt": LONG, "max_tokens": 12, "temperature": 0}
    texts = [client.completions.create(model=name, **asked).choices[0].text for name in ("tl", "one")]
    body = {"lora_name": "other", "lora_path": "two"}
    loaded = http.post("/v1/load_lora_adapter", json=body)
    assert loaded.status_code == 200 and "other" in loaded.text
    assert http.post("/v1/load_lora_adapter", json=body).json()["error"]["code"] == "adapter_loaded"
    assert http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True}).status_code == 200
    assert {m.id: m.parent for m in client.models.list()} == {"tl": None, "one": "tl", "other": "tl"}
    texts.append(client.completions.create(model="other", **asked).choices[0].text)
    assert len(set(texts)) == 3
    assert [client.completions.create(model=n, **asked).choices[0].text for n in ("tl", "one")] == texts[:2]
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "other"}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", **asked)


# -- load


def test_more_than_runs_and_waits_is_told_to_come_again(http, live):
    """Case V5: 200 calls at once with a queue of 8."""
    found = []

    def call():
        body = {"model": "tl", "prompt": LONG, "max_tokens": 40}
        found.append(many.post("/v1/completions", json=body))

    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=live.url, headers=http.headers, timeout=60, limits=limits) as many:
        threads = [threading.Thread(target=call) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    codes = [answer.status_code for answer in found]
    assert set(codes) <= {200, 429} and codes.count(200) >= 8 and len(codes) == 200
    for answer in found:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
    assert 429 in codes and settled(http)


def test_who_leaves_a_stream_frees_its_pages(http):
    """Case V3."""
    for n in (1, 4):
        body = {"model": "tl", "prompt": LONG, "max_tokens": 4000, "stream": True, "n": n}
        for turn in range(50):
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                for _ in range(3):
                    next(lines)
            assert turn % 10 or settled(http)
        assert settled(http)


def test_who_hangs_up_before_the_answer_frees_its_pages(http, live):
    """Case V3: without a stream, while others run, and while in line."""
    body = {"model": "tl", "prompt": LONG, "max_tokens": 4000, "n": 8}
    for turn in range(50):
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=0.05)
        assert turn % 10 or settled(http)
    blocked = [_open(live, 4000, n=8)]
    time.sleep(0.1)
    blocked += [_open(live, 10) for _ in range(3)]
    time.sleep(0.1)
    for sock in blocked:
        sock.close()
    assert settled(http)
    said = [line for line in live.of("request") if line.get("error") and "closed" in line["error"]]
    assert said and all(line["status"] == 499 for line in said)
    answer = http.post("/v1/completions", json={"model": "tl", "prompt": "hello", "max_tokens": 5})
    assert answer.status_code == 200 and gauges(http)["vllm:num_requests_running"] == 0


def _open(live, tokens, n=1):
    """A connection whose request was sent and whose answer nobody reads."""
    body = json.dumps({"model": "tl", "prompt": LONG, "max_tokens": tokens, "n": n}).encode()
    host, port = live.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_the_log_has_numbers_and_no_texts(client, live):
    client.completions.create(
        model="tl", prompt="a secret café", max_tokens=3, extra_headers={"x-request-id": "r1"}
    )
    line = live.request("r1")
    assert line["status"] == 200 and line["completion_tokens"] == 3 and line["model"] == "tl"
    assert line["total_ms"] >= line["first_ms"] > 0
    assert "secret" not in "".join(live.raw) and KEY not in "".join(live.raw)
