"""Tokenizers through files: ours written and read back, and SentencePiece's own as an oracle."""

import io

import pytest
import sentencepiece
from tokenizers import Regex, pre_tokenizers

from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_file import GGUFError
from hfaccel.formats.gguf_tokenizer import read_tokenizer
from hfaccel.formats.gguf_vocab import PATTERNS, metadata_of
from vocabularies import WORDS, byte_level, sentence_piece

TEXTS = [
    "",
    "the then",
    "  Hello   world!\n\n\tcafé 2026 12345 it's <user> über 日本語 😀 ",
    "<s>the</s> other",
    "a\u00a0b ▁ x",
]
QWEN = next(steps for steps, name in PATTERNS.items() if name == "qwen2")[0][1]


def read(tokenizer, **more):
    return read_tokenizer(metadata_of(tokenizer, len(tokenizer) + 3) | more)


def prefixes(tokenizer) -> bool:
    return (
        metadata_of(tokenizer, len(tokenizer))["tokenizer.ggml.model"] == "gpt2"
        or (metadata_of(tokenizer, len(tokenizer))["tokenizer.ggml.add_space_prefix"])
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: byte_level(),
        lambda: byte_level(bos=True),
        lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
        lambda: sentence_piece(),
        lambda: sentence_piece(prefix=False),
    ],
    ids=["bytes", "bytes with a start", "digits", "sentencepiece", "sentencepiece without a space"],
)
def test_what_is_written_is_read_back(make):
    wanted = make()
    found = read(wanted)
    for text in TEXTS:
        assert found(text).input_ids == wanted(text).input_ids, text
        ids = wanted(text).input_ids
        if prefixes(wanted):  # without, the test's own takes a first space away that nobody put there
            assert found.decode(ids) == wanted.decode(ids)
            assert found.decode(ids, skip_special_tokens=True) == wanted.decode(ids, skip_special_tokens=True)
        elif "<s>" not in text and "▁" not in text:
            assert found.decode(ids, skip_special_tokens=True) == text
    assert found("the", "then").input_ids == wanted("the", "then").input_ids
    chat = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(chat, tokenize=False) == wanted.apply_chat_template(chat, tokenize=False)
    assert {**found.special_tokens_map, **wanted.special_tokens_map} == found.special_tokens_map


def test_a_pattern_of_its_own_cuts_as_the_regex_says():
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = byte_level()
    metadata = metadata_of(tokenizer, len(tokenizer)) | {"tokenizer.ggml.pre": "qwen2"}
    found = read_tokenizer(metadata)
    for text in TEXTS:
        assert found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) == split.pre_tokenize_str(text)


def test_llama_3_takes_words_whole_and_starts_texts_unless_the_file_says_otherwise():
    tokenizer = byte_level()
    metadata = metadata_of(tokenizer, len(tokenizer)) | {"tokenizer.ggml.pre": "llama-bpe"}
    metadata["tokenizer.ggml.merges"] = []  # " the" is a token, and nothing makes it
    word = metadata["tokenizer.ggml.tokens"].index("Ġthe")
    del metadata["tokenizer.ggml.add_bos_token"]
    assert read_tokenizer(metadata)(" the").input_ids == [1, word]
    assert read_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": False})(" the").input_ids == [word]
    plain = read_tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"})(" the").input_ids
    assert len(plain) == 4 and word not in plain


def test_smaug_and_dbrx_cut_like_llama_3_and_do_nothing_else_like_it():
    """Of llama.cpp's names for one pattern, only llama 3's take words whole and start texts."""
    metadata = metadata_of(tokenizer := byte_level(), len(tokenizer)) | {"tokenizer.ggml.merges": []}
    del metadata["tokenizer.ggml.add_bos_token"]
    llama = read_tokenizer(metadata | {"tokenizer.ggml.pre": "llama3"})
    for name in ("smaug-bpe", "dbrx"):
        other = read_tokenizer(metadata | {"tokenizer.ggml.pre": name})
        for text in TEXTS:
            cut = [each.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) for each in (llama, other)]
            assert cut[0] == cut[1]
        assert len(other(" the").input_ids) == 4 and len(llama(" the").input_ids) == 2


@pytest.mark.parametrize("change", [{"tokenizer.ggml.pre": "default"}, {"tokenizer.ggml.pre": None}])
def test_a_file_that_names_no_pattern_is_cut_as_llama_cpp_cuts_it(change, caplog):
    metadata = metadata_of(tokenizer := byte_level(), len(tokenizer)) | change
    metadata = {key: value for key, value in metadata.items() if value is not None}
    cut = read_tokenizer(metadata).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    pieces = [piece for piece, _ in cut("it's (a) $5, 12345 x\n\n y  z")]
    wanted = ["it", "'", "s", "Ġ", "(", "a", ")", "Ġ", "$", "5", ",", "Ġ", "123", "45", "Ġx", "ĊĊ", "Ġy"]
    assert pieces == [*wanted, "Ġ", "Ġz"]
    assert ("tokenizer.ggml.pre is missing" in caplog.text) is (change["tokenizer.ggml.pre"] is None)


def test_sentencepieces_usual_tokens_are_taken_where_a_file_names_none():
    named = metadata_of(tokenizer := sentence_piece(), len(tokenizer))
    metadata = {key: value for key, value in named.items() if not key.endswith("_token_id")}
    del metadata["tokenizer.ggml.add_bos_token"]
    found = read_tokenizer(metadata)
    assert (found.bos_token_id, found.eos_token_id, found.unk_token_id) == (1, 2, 0)
    assert found("the then").input_ids == tokenizer("the then").input_ids
    assert read_tokenizer(metadata | {"tokenizer.ggml.bos_token_id": 7})("the").input_ids[0] == 7


@pytest.mark.parametrize("text", ["{bos}", "{", "a:b", "$A", "$0:1", "%s", ":"])
def test_start_tokens_of_any_text(text):
    metadata = metadata_of(tokenizer := byte_level(bos=True), len(tokenizer))
    metadata["tokenizer.ggml.tokens"][1] = text
    metadata["tokenizer.ggml.token_type"][1] = 3
    if text in metadata["tokenizer.ggml.tokens"][2:]:  # a single byte
        metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.tokens"].index(text, 2)] = "[moved]"
    found = read_tokenizer(metadata | {"tokenizer.ggml.add_eos_token": True})
    assert found("").input_ids == [1, 2]
    assert found.backend_tokenizer.encode("", "").ids == [1, 2, 1, 2]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepieces_own_tokens(prefix, tmp_path):
    """A BPE model trained here by sentencepiece, described as converters describe one."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))] * 4),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = theirs.vocab_size()
    kinds = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
        for i in range(size)
    ]
    found = read_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in range(size)],
            "tokenizer.ggml.scores": [float(theirs.get_score(i)) for i in range(size)],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": theirs.bos_id(),
            "tokenizer.ggml.eos_token_id": theirs.eos_id(),
            "tokenizer.ggml.add_space_prefix": prefix,
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    for text in ["the then there", "hello  world 2026", "café über naïve", "日本 x", "withother then"]:
        ids = theirs.encode(text)
        assert found(text).input_ids == ids, text
        assert found.decode(ids) == theirs.decode(ids) == text


BAD = {
    "no model": ({"tokenizer.ggml.model": None}, GGUFError, "tokenizer.ggml.model is missing"),
    "unknown model": ({"tokenizer.ggml.model": "rwkv"}, UnsupportedModel, "'rwkv'; known are gpt2, llama"),
    "unknown pattern": (
        {"tokenizer.ggml.pre": "nobody"},
        UnsupportedModel,
        "'nobody'; known are .*llama-bpe",
    ),
    "no tokens": ({"tokenizer.ggml.tokens": None}, GGUFError, "tokenizer.ggml.tokens is missing"),
    "empty": ({"tokenizer.ggml.tokens": []}, GGUFError, "tokenizer.ggml.tokens is empty"),
    "numbers": ({"tokenizer.ggml.tokens": [1, 2]}, GGUFError, "tokens is no list of str"),
    "too few types": ({"tokenizer.ggml.token_type": [1]}, GGUFError, "token_type has 1 values for"),
    "special outside": ({"tokenizer.ggml.eos_token_id": 9999}, GGUFError, "eos_token_id is 9999"),
    "merge of nothing": ({"tokenizer.ggml.merges": ["qq zz"]}, GGUFError, "merges: 'qq zz' is not made of"),
    "merge without a cut": ({"tokenizer.ggml.merges": ["the"]}, GGUFError, "merges: 'the' is not made of"),
    "template": ({"tokenizer.chat_template": 5}, GGUFError, "chat_template is no text"),
    "flag": ({"tokenizer.ggml.add_bos_token": 1}, GGUFError, "add_bos_token is no bool"),
}


@pytest.mark.parametrize("change, error, words", BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(change, error, words):
    with pytest.raises(error, match=words):
        read(byte_level(), **change)


def test_a_piece_of_absurd_length_is_refused_before_it_is_cut():
    metadata = metadata_of(tokenizer := sentence_piece(), len(tokenizer))
    metadata["tokenizer.ggml.tokens"][-1] = "a" * 1024
    assert read_tokenizer(metadata)("the").input_ids
    metadata["tokenizer.ggml.tokens"][-1] = "a" * 10_000_000
    with pytest.raises(GGUFError, match="tokens has one of 10000000 characters, 1024 at most"):
        read_tokenizer(metadata)


def test_tokens_twice_are_named():
    metadata = metadata_of(tokenizer := byte_level(), len(tokenizer))
    metadata["tokenizer.ggml.tokens"][7] = metadata["tokenizer.ggml.tokens"][9]
    with pytest.raises(GGUFError, match="tokens has .* twice"):
        read_tokenizer(metadata)
