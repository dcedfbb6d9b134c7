"""text.py: what comes out token by token is the text, cut where a stop string first is complete."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfaccel.serve.text import Text


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level: every byte is a token, and a few pairs are."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("a", "b"), ("b", "a"), ("Ġ", "a"), ("Ã", "©")]
    vocab = {token: n for n, token in enumerate([*letters, *(a + b for a, b in pairs), "<end>"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def parts(tokenizer, ids, stops=()):
    text = Text(tokenizer, stops)
    found = []
    for token in ids:
        found.append(text.put(token))
        if text.stopped:
            break
    return [*found, text.end()], text


def cut(text, stops):
    """By characters: the text in front of the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@pytest.mark.parametrize(
    "text", ["plain text", "é à 漢字 🎉🎉 end", "aab aaab", " a  b ", "\ufffd odd \ufffd"]
)
def test_the_parts_are_the_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    found, _ = parts(tokenizer, ids)
    assert "".join(found) == text
    assert len(ids) > 2 and sum(map(bool, found)) > 1


def test_no_part_ends_within_a_character(tokenizer):
    ids = tokenizer("x漢y🎉z")["input_ids"]
    assert len(ids) == 1 + 3 + 1 + 4 + 1
    assert [p for p in parts(tokenizer, ids)[0] if p] == ["x", "漢", "y", "🎉", "z"]


def test_bytes_that_never_become_a_character_come_out_in_the_end(tokenizer):
    ids = tokenizer("x漢")["input_ids"][:-1]
    assert parts(tokenizer, ids)[0] == ["x", "", "", tokenizer.decode(ids)[1:]]
    many = ids[1:2] * 9  # the first byte again and again
    assert "".join(parts(tokenizer, many)[0]) == tokenizer.decode(many)


def test_special_tokens_are_not_text(tokenizer):
    ids = [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id]
    assert "".join(parts(tokenizer, ids)[0]) == "ab"
    text = Text(tokenizer, keep_special=True)
    assert "".join([text.put(token) for token in ids] + [text.end()]) == "ab<end>"


@pytest.mark.parametrize(
    "text, stops, want",
    [
        ("one two three", ["wo th"], "one t"),  # over several tokens
        ("x ab y", ["b y"], "x a"),  # begins within a token
        ("x ab y", [" a"], "x"),  # ends within one
        ("abcabd", ["cab", "abd"], "ab"),  # overlap
        ("xaaab", ["aab"], "xa"),  # begins again
        ("abc", ["b", "abc"], "a"),  # the first to be complete
        ("abc", ["c", "abc"], ""),  # both at once: what began first
        ("never", ["err", "ver!"], "never"),
        ("é!", ["é"], ""),
        ("", ["a"], ""),
    ],
)
def test_stop_strings(tokenizer, text, stops, want):
    found, state = parts(tokenizer, tokenizer(text)["input_ids"], stops)
    assert "".join(found) == want == cut(text, stops) and state.stopped


def test_random_texts_and_stops_however_they_are_cut_into_tokens(tokenizer):
    draw = random.Random(1)
    stopped = 0
    for _ in range(300):
        text = "".join(draw.choice("abé ") for _ in range(draw.randrange(1, 14)))
        stops = ["".join(draw.choice("abé ") for _ in range(draw.randrange(1, 5))) for _ in range(2)]
        ids = [n for part in text for n in tokenizer(part)["input_ids"]]
        for tokens in (ids, tokenizer(text)["input_ids"]):
            seen, text_of = "", Text(tokenizer, stops)
            for n, token in enumerate(tokens):
                seen += text_of.put(token)
                whole = tokenizer.decode(tokens[: n + 1]).rstrip("\ufffd")
                if text_of.stopped:
                    stopped += 1
                    break
                assert len(whole) - len(seen) <= max(map(len, stops)) - 1
            assert seen + text_of.end() == cut(text, stops)
    assert 100 < stopped < 500
