"""asked.py: what fields ask for together, and what clients send that no template or tokenizer takes."""

import json

import pytest

from engines import patched
from hfaccel.serve.api import create_app
from hfaccel.serve.server import Server
from vocabularies import byte_level

# As many real ones, it adds contents to other texts: one that is missing is an error.
TEMPLATE = "{% for m in messages %}{{ '<s>' + m['role'] + ' ' + m['content'] + '</s>' }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def ask(talk):
    """A path and a body in, an answer out."""
    with Server(patched("TL"), byte_level(template=TEMPLATE), pages=200) as server:
        app = create_app(server, model_name="m")

        def ask(path, **body):
            how = {
                "content": json.dumps({"model": "m"} | body),
                "headers": {"content-type": "application/json"},
            }
            return talk(app, lambda http: http.post(path, **how))

        yield ask


@pytest.mark.parametrize("token", [-1, 512, 10**30])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_echoed_is_looked_at_before(ask, token, stream):
    refused = ask("/v1/completions", prompt=[5, token], echo=True, max_tokens=1, stream=stream)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
    assert f"token id {token} " in refused.text


def test_what_needs_a_tokenizer_says_so(model, talk):
    with Server(model, pages=60) as server:
        app, asked = create_app(server, model_name="m"), {"model": "m", "prompt": [5, 6], "max_tokens": 1}
        for field, value in {"echo": True, "logprobs": 1, "best_of": 2, "prompt": "hi", "stop": "x"}.items():
            body = asked | {field: value}
            refused = talk(app, lambda http, body=body: http.post("/v1/completions", json=body))
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field
            assert "tokenizer" in refused.json()["error"]["message"]


def called(arguments):
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def test_a_call_without_content_goes_through_templates(ask):
    messages = [*MESSAGES, called("{}"), {"role": "tool", "tool_call_id": "c1", "content": "7"}]
    assert ask("/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000], ids=["cut", "deep"])
def test_arguments_that_are_no_json_are_refused(ask, arguments):
    refused = ask("/v1/chat/completions", messages=[*MESSAGES, called(arguments)])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
    assert "arguments of call 'c1'" in refused.text


def test_messages_have_the_tokens_that_a_chat_has(ask):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": parts}, *MESSAGES]
    counted = ask("/tokenize", messages=messages).json()["count"]
    chat = ask("/v1/chat/completions", messages=messages, max_tokens=1).json()
    assert counted == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", ["chat_template", "truncation", "max_length", "add_generation_prompt"])
def test_templates_get_what_is_theirs_alone(ask, name):
    """Not a template of the client's, which would run here, nor what cuts a prompt unseen."""
    refused = ask("/v1/chat/completions", messages=MESSAGES, chat_template_kwargs={name: "{{ 1 }}"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"
    assert repr(name) in refused.json()["error"]["message"]


def test_a_completion_has_16_tokens_by_default(ask):
    def tokens(**body):
        answer = ask("/v1/completions", prompt=[5, 6], ignore_eos=True, temperature=0, **body).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert tokens() == (16, "length")
    assert tokens(min_tokens=20) == (20, "length")
    assert tokens(max_tokens=17) == (17, "length")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_half_a_pair_of_surrogates_is_no_text(ask, path):
    refused = ask(path, prompt="a\ud83d")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
