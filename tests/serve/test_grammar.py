"""grammar.py: what a random model writes, by an independent validator; what cannot be enforced is named."""

import asyncio
import json

import jsonschema
import pytest
import torch

import hfaccel
from engines import patched
from hfaccel.serve.api import create_app
from hfaccel.serve.grammar import BadGrammar, structured
from hfaccel.serve.server import Server
from vocabularies import byte_level

CODE = {"type": "string", "pattern": "^[A-Z]{2}$"}
SCHEMAS = {
    "integer": {"type": "integer", "minimum": 18, "maximum": 21},
    "negative": {"type": "integer", "minimum": -3, "maximum": 4},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
    "items": {"type": "array", "minItems": 2, "maxItems": 3, "items": CODE},
    "enum": {"enum": [1, 22, None, "a", "ab", True]},
    "nested": {
        "type": "object",
        "properties": {
            "rows": {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"code": CODE, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
                    "required": ["code", "n"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["rows"],
        "additionalProperties": False,
    },
    "reference": {
        "$ref": "#/$defs/c",
        "$defs": {"c": {"type": "array", "items": CODE, "minItems": 1, "maxItems": 1}},
    },
    "const": {"const": {"a": [1, "x"]}},
    "all": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 12}]},
    "date": {"type": "string", "format": "date"},
    "tuple": {"type": "array", "prefixItems": [CODE, {"type": "boolean"}], "items": False, "minItems": 2},
    "any": {"anyOf": [{"type": "null"}, CODE]},
    "text": {"type": "string", "minLength": 2, "maxLength": 5},
    "boolean": {"type": "boolean"},
    "types": {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9},
    "step": {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 15},
    "clock": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": CODE, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "named": {
        "type": "object",
        "properties": {word: {"type": "integer", "minimum": 0, "maximum": 9} for word in ("é/ü", 'a"b')},
        "required": ["é/ü", 'a"b'],
        "additionalProperties": False,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
                "required": ["left"],
                "additionalProperties": False,
            },
            "leaf": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
    },
}
WORDS = ["在线", "😀 ok", "a/b", 'say "hi"', "C:\\x", "tab\tand\nline", "é", "e\u0301", "", "a", "ab"]


@pytest.fixture(scope="module")
def model():
    return patched("TL")  # 512 rows of logits, a tokenizer of fewer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(template="{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.fixture(scope="module")
def ask(model, tokenizer, talk):
    """Bodies of /v1/completions in, answers out, all at once."""
    with Server(model, tokenizer, pages=2000, max_running=64) as server:
        app = create_app(server, model_name="m")

        def ask(*bodies):
            async def conversation(http):
                common = {"model": "m", "prompt": "hello", "max_tokens": 120, "temperature": 1.5}
                calls = (http.post("/v1/completions", json=common | body) for body in bodies)
                return [answer.json() for answer in await asyncio.gather(*calls)]

            return talk(app, conversation)

        yield ask


def of_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def test_sampled_replies_are_valid(ask):
    """Case J1: 200 replies over 20 schemas, beside a row without one."""
    names = list(SCHEMAS)
    assert len(names) == 20
    bodies = [of_schema(SCHEMAS[name]) | {"n": 10, "seed": 100 * at} for at, name in enumerate(names)]
    free = {"seed": 7, "max_tokens": 20}
    *found, beside = ask(*bodies, free)
    assert beside["choices"][0]["text"] == ask(free)[0]["choices"][0]["text"]
    for name, got in zip(names, found, strict=True):
        assert "choices" in got, (name, got)
        ended = [choice["text"] for choice in got["choices"] if choice["finish_reason"] == "stop"]
        assert len(ended) >= 9, name
        for text in ended:
            jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    assert len({choice["text"] for choice in found[0]["choices"]}) > 1


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "string", "pattern": "^(?=a)b"}, "look-"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_named(ask, schema, named):
    error = ask(of_schema(schema))[0]["error"]
    assert error["param"] == "response_format" and named in error["message"]
    assert error["type"] == "invalid_request_error"


def test_what_is_too_large_on_the_way_is_the_clients_error(ask):
    error = ask({"structured_outputs": {"regex": "ab(c{1000}){1000}"}})[0]["error"]
    assert error["type"] == "invalid_request_error" and "too many expressions" in error["message"]
    assert "⟦" not in error["message"]  # what was written so far


def test_words_of_every_kind_come_out(ask):
    """Case J3: as constants, and all of them of an enum."""
    found = ask(*[of_schema({"const": word}) for word in WORDS])
    assert [json.loads(got["choices"][0]["text"]) for got in found] == WORDS
    plain = {"temperature": 50, "n": 100}
    some = [ask(of_schema({"enum": WORDS}) | plain | {"seed": 1000 * at})[0] for at in range(5)]
    texts = {json.loads(choice["text"]) for got in some for choice in got["choices"]}
    assert texts == set(WORDS)


def test_regex_choice_grammar_and_stop_strings(ask):
    asked = [
        {"structured_outputs": {"regex": "[a-c]{3}x"}},
        {"structured_outputs": {"choice": ["yes", 'n"o']}},
        {"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c") "d"'}},
        {"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}},
        {"structured_outputs": {"regex": "abcdef"}, "stop": "de"},
        {"response_format": {"type": "json_object"}, "max_tokens": 200, "n": 4},
    ]
    regex, choice, gbnf, lark, stopped, anything = ask(*asked)
    assert set(regex["choices"][0]["text"][:3]) <= set("abc") and regex["choices"][0]["text"][3:] == "x"
    assert choice["choices"][0]["text"] in ("yes", 'n"o') and gbnf["choices"][0]["text"] in ("abd", "acd")
    assert lark["choices"][0]["text"][0] == "x" and lark["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == "abc" and stopped["choices"][0]["stop_reason"] == "de"
    for one in anything["choices"]:
        assert one["text"].startswith("{")
        assert one["finish_reason"] == "length" or isinstance(json.loads(one["text"]), dict)


def test_generate_writes_what_a_class_says(model, tokenizer):
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(pattern="^[a-z]{1,5}$")
        age: int = Field(ge=0, le=120)

    assert hfaccel.structured is structured
    tokenizer.pad_token = "<pad>"
    inputs = tokenizer(["hello", "the world"], return_tensors="pt", padding=True, padding_side="left")
    how = {"max_new_tokens": 60, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(3)
    for more in ({"do_sample": True, "temperature": 1.5}, {"do_sample": False}, {"num_beams": 2}):
        out = model.generate(**inputs, **how, **more, logits_processor=structured(Person, tokenizer))
        for row in out[:, inputs["input_ids"].shape[1] :]:
            Person.model_validate_json(tokenizer.decode(row, skip_special_tokens=True))
    with pytest.raises(BadGrammar, match="uniqueItems"):
        structured({"type": "array", "uniqueItems": True}, tokenizer)
