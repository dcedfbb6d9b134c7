"""replies.py: what is streamed is what comes whole, whatever a request asks for together."""

import json
import random

import pytest

from engines import patched
from hfaccel.serve.api import create_app
from hfaccel.serve.server import Server
from live import TEMPLATE
from vocabularies import byte_level, sentence_piece

ENUM = {"enum": ["在线", "a/b", "😀"]}
PAINT = {"type": "object", "properties": {"in": ENUM}, "required": ["in"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "grün", "parameters": PAINT}},
]
NAMED = {"type": "function", "function": {"name": "grün"}}
FORMATS = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": ENUM}}]
PROMPTS = ["hello the world", "é" * 30, "the then there " * 10, "在线"]
OPTIONS = {
    "stop": [["e", "th"], ["\n", "o w", "é"], [" "], "�"],
    "include_stop_str_in_output": [True],
    "min_tokens": [1],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "frequency_penalty": [1.5],
    "top_p": [0.7],
}
OF_CHAT = {
    "logprobs": [{"logprobs": True}, {"logprobs": True, "top_logprobs": 3}],
    "rule": [
        *({"tools": TOOLS, "tool_choice": choice} for choice in ("auto", "required", "none", NAMED)),
        *({"response_format": form} for form in FORMATS),
    ],
}
OF_COMPLETION = {
    "logprobs": [{"logprobs": 0}, {"logprobs": 2}],
    "echo": [{"echo": True}, {"echo": True, "max_tokens": 0, "min_tokens": None}],
    "rule": [{"structured_outputs": {"regex": "[a-cé]{2,9}"}}],
}


def asked(seed, chat):
    draw = random.Random(seed)
    body = {"temperature": draw.choice([0, 0.8, 1.5, 5]), "seed": seed, "n": draw.choice([1, 1, 2, 5])}
    body["max_tokens"] = draw.choice([1, 2, 5, 20, 60])
    body |= {name: draw.choice(some) for name, some in OPTIONS.items() if draw.random() < 0.25}
    for some in (OF_CHAT if chat else OF_COMPLETION).values():
        body |= draw.choice(some) if draw.random() < 0.4 else {}
    if body.keys() & {"tools", "response_format", "structured_outputs"}:  # contradicts them
        body.pop("min_tokens", None)
    prompt = draw.choice(PROMPTS)
    if chat:
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": draw.choice([prompt, [prompt, "x"], [5, 6, 7], [[5, 6], [7] * 9]])}


@pytest.fixture(scope="module", params=[byte_level, sentence_piece], ids=lambda make: make.__name__)
def post(request, talk):
    with Server(patched("TL"), request.param(template=TEMPLATE), pages=2000) as server:
        app = create_app(server, model_name="m")
        yield lambda path, body: talk(app, lambda http: http.post(path, json={"model": "m"} | body))


def joined(choices, chat):
    """Chunks of one choice as the choice that they make, but for calls' ids."""
    made = {"finish_reason": choices[-1]["finish_reason"], "stop_reason": choices[-1].get("stop_reason")}
    assert not any(choice["finish_reason"] for choice in choices[:-1])
    known = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    made["logprobs"] = {name: [x for one in known for x in one[name] or ()] for name in (known or [{}])[0]}
    if not chat:
        return made | {"text": "".join(choice["text"] for choice in choices)}
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    made["calls"] = [call["function"] for call in calls]
    return made | {"text": "".join(delta.get("content") or "" for delta in deltas)}


def as_joined(choice, chat):
    made = {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    made["logprobs"] = {name: some for name, some in (choice["logprobs"] or {}).items() if name != "refusal"}
    if not chat:
        return made | {"text": choice["text"]}
    message = choice["message"]
    made["calls"] = [call["function"] for call in message.get("tool_calls", ())]
    return made | {"text": message["content"] or ""}


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_is_the_whole_in_pieces(post, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    for seed in range(40):
        body = asked(seed, chat)
        whole = post(path, body).json()
        assert "choices" in whole, (body, whole)
        text = post(path, body | {"stream": True, "stream_options": {"include_usage": True}}).text
        *events, done, rest = text.split("\n\n")
        assert done == "data: [DONE]" and rest == ""
        *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
        assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in chunks)
        cached = {"prompt_tokens_details": None}
        assert last["choices"] == [] and last["usage"] | cached == whole["usage"] | cached, body
        of = {}
        for chunk in chunks:
            of.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
        assert sorted(of) == [choice["index"] for choice in whole["choices"]]
        for choice in whole["choices"]:
            want, got = as_joined(choice, chat), joined(of[choice["index"]], chat)
            got["logprobs"].pop("refusal", None)
            for values in ("token_logprobs", "top_logprobs"):  # beside other rows, an ulp
                if values in want["logprobs"]:
                    counts = {len(one["logprobs"].pop(values)) for one in (want, got)}
                    assert len(counts) == 1, body
            assert got == want, body
