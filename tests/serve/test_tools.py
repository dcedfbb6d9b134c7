"""tools.py: calls out of text, whole and in pieces of any size, and through the API (case J5)."""

import json

import jsonschema
import pytest

from engines import patched
from hfaccel.serve.api import create_app
from hfaccel.serve.server import Server
from hfaccel.serve.tools import Calls
from live import TEMPLATE
from vocabularies import byte_level

NAMES = ["now", "add"]
ONE = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
TEXTS = {  # dialect, text -> content, calls
    "one": ("hermes", f"so <tool_call>\n{ONE}\n</tool_call>", "so ", ["add"]),
    "two": ("hermes", f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", "", ["add", "add"]),
    "none": ("hermes", "a < b <tool", "a < b <tool", []),
    "unknown": ("hermes", '<tool_call>{"name": "x"}</tool_call>', '<tool_call>{"name": "x"}</tool_call>', []),
    "broken": ("hermes", "<tool_call>{no}</tool_call> y", "<tool_call>{no}</tool_call> y", []),
    "empty": ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", ["now"]),
    "bare": ("llama", '{"name": "add", "parameters": {"a": 1}}', "", ["add"]),
    "tagged": ("llama", '<|python_tag|>{"name": "add", "parameters": {}}', "", ["add"]),
    "json": ("llama", '{"a": 1}', '{"a": 1}', []),
    "prose": ("llama", "it is {so}", "it is {so}", []),
    "listed": ("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]", "", ["add", "add"]),
    "after": ("mistral", f"well [TOOL_CALLS] [{ONE}]", "well ", ["add"]),
    "marked": ("mistral", "[TOOL_CALLS] I cannot", " I cannot", []),
    "no name": (
        "hermes",
        '<tool_call>{"name": ["add"]}</tool_call>',
        '<tool_call>{"name": ["add"]}</tool_call>',
        [],
    ),
    "no JSON": (
        "llama",
        '{"name": "add", "parameters": {"a": NaN}}',
        '{"name": "add", "parameters": {"a": NaN}}',
        [],
    ),
    "half": ("llama", '{"name": "add", "parameters": {"a": "\\ud83d", "b": "é"}}', "", ["add"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_calls_in_pieces_are_those_of_the_whole(name):
    dialect, text, content, calls = TEXTS[name]
    whole = Calls(NAMES, dialect)
    got, found = whole.whole(text, cut=False)
    assert got == content and [call["function"]["name"] for call in found] == calls
    assert whole.reason("stop") == ("tool_calls" if calls else "stop") and whole.reason("length") == "length"
    for size in (1, 2, 3, 7, 40):
        own, deltas = Calls(NAMES, dialect), []
        for at in range(0, len(text), size):
            deltas += own.put(text[at : at + size])
        deltas += own.end(cut=False)
        assert "".join(delta.get("content", "") for delta in deltas) == content
        streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["function"] for call in streamed] == [call["function"] for call in found]
        assert [call["index"] for call in streamed] == list(range(len(calls)))
        assert len({call["id"] for call in streamed}) == len(calls)


def test_arguments_are_text_that_can_be_sent():
    for written, said in {'"é \\u2028"': '"é \u2028"', '"\\ud83d"': '"\\ud83d"'}.items():
        text = f'{{"name": "add", "parameters": {{"a": {written}}}}}'
        _, (call,) = Calls(NAMES, "llama").whole(text, cut=False)
        assert call["function"]["arguments"] == f'{{"a": {said}}}'
        assert call["function"]["arguments"].encode()


def test_what_is_nested_beyond_measure_is_no_call():
    text = '<tool_call>{"name": "add", "arguments": "' + "[" * 100_000 + '"}</tool_call>'
    assert Calls(NAMES, "hermes").whole(text, cut=False) == (text, [])


def test_a_call_that_was_cut_is_none():
    for dialect, text in [
        ("hermes", "<tool_call>" + ONE[:-4]),
        ("llama", ONE[:-4]),
        ("mistral", "[TOOL_CALLS][" + ONE[:9]),
    ]:
        content, calls = Calls(NAMES, dialect).whole(text, cut=True)
        assert (content, calls) == ("", [])


TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {
                    "colour": {"enum": ["red", "grün"]},
                    "at": {"$ref": "#/$defs/point"},
                },
                "required": ["colour", "at"],
                "additionalProperties": False,
                "$defs": {
                    "point": {
                        "type": "object",
                        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
]
PAINT = {"type": "function", "function": {"name": "paint"}}


@pytest.fixture(scope="module")
def ask(talk):
    with Server(patched("TL"), byte_level(template=TEMPLATE), pages=2000) as server:
        app = create_app(server, model_name="m")

        def ask(**body):
            common = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
            common |= {"temperature": 1.2, "seed": 3, "max_tokens": 400}
            return talk(app, lambda http: http.post("/v1/chat/completions", json=common | body))

        yield ask


@pytest.mark.parametrize("choice", ["required", PAINT], ids=["required", "named"])
@pytest.mark.parametrize("seed", range(4))
def test_demanded_calls_are_valid_whole_and_streamed(ask, choice, seed):
    (got,) = ask(tool_choice=choice, seed=seed).json()["choices"]
    calls = got["message"]["tool_calls"]
    assert got["finish_reason"] == "tool_calls" and calls and got["message"]["content"] is None
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert name == "paint" or choice == "required"
        schema = next(t["function"] for t in TOOLS if t["function"]["name"] == name).get("parameters")
        jsonschema.validate(arguments, schema or {"const": {}})
    events = ask(tool_choice=choice, seed=seed, stream=True).text.split("\n\n")
    chunks = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events if e and "[DONE]" not in e]
    streamed = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]
    assert chunks[-1]["finish_reason"] == "tool_calls"


def one_of(name, **parameters):
    closed = {"type": "object", "required": ["at"], "additionalProperties": False} | parameters
    return {"type": "function", "function": {"name": name, "parameters": closed}}


def test_what_schemas_refer_to_is_their_own(ask):
    """Two definitions of one name; one that is the whole schema; a property that is called like a keyword."""
    at = {"properties": {"at": {"$ref": "#/$defs/place"}}}
    tools = [
        one_of("flag", **at, **{"$defs": {"place": {"type": "boolean"}}}),
        one_of("sign", **at, **{"$defs": {"place": {"enum": ["N", "S"]}}}),
        one_of("tree", properties={"at": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
        one_of(
            "enum",
            required=["enum"],
            properties={"enum": {"$ref": "#/definitions/x"}},
            definitions={"x": {"const": {"$ref": "#/x"}}},
        ),
    ]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    seen = {}
    for seed in range(6):
        (got,) = ask(tools=tools, tool_choice="required", seed=seed, temperature=50).json()["choices"]
        for call in got["message"].get("tool_calls", ()):
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, schemas[name])
            seen[name] = arguments
    assert seen.keys() == schemas.keys() and seen["enum"] == {"enum": {"$ref": "#/x"}}


def test_a_demanded_call_that_is_cut_says_so(ask):
    (got,) = ask(tool_choice=PAINT, max_tokens=5).json()["choices"]
    assert got["finish_reason"] == "length" and "tool_calls" not in got["message"]


def test_no_calls_where_none_are_wanted(ask):
    for choice in ("none", "auto"):
        (got,) = ask(tool_choice=choice, max_tokens=20).json()["choices"]
        assert "tool_calls" not in got["message"] and got["finish_reason"] in ("stop", "length")


def test_tools_that_are_wrong_are_refused_by_name(ask):
    unknown = ask(tool_choice={"type": "function", "function": {"name": "fly"}})
    assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "tool_choice"
    assert "fly" in unknown.text
    for parameters in ({"type": "object", "not": {}}, {"$ref": "#/$defs/x", "$defs": [1]}):
        bad = [{"type": "function", "function": {"name": "x", "parameters": parameters}}]
        refused = ask(tools=bad, tool_choice="required")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools", parameters
    twice = ask(tools=[TOOLS[0], TOOLS[0]])
    assert twice.status_code == 400 and twice.json()["error"]["param"] == "tools"
