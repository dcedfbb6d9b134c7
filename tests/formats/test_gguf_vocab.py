import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_vocab import (
    BYTE,
    CONTROL,
    NORMAL,
    PATTERNS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    metadata_of,
)
from vocabularies import TEMPLATE, byte_level, sentence_piece


def test_byte_level_bpe():
    tokenizer = byte_level()
    out = metadata_of(tokenizer, 300)
    tokens, kinds = out["tokenizer.ggml.tokens"], out["tokenizer.ggml.token_type"]
    assert out["tokenizer.ggml.model"] == "gpt2" and out["tokenizer.ggml.pre"] == "gpt-2"
    assert len(tokens) == len(kinds) == 300 == len(set(tokens))
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert kinds[:3] == [CONTROL] * 3 and kinds[3] == NORMAL
    assert kinds[tokenizer.convert_tokens_to_ids("<user>")] == USER_DEFINED
    assert set(kinds[len(tokenizer) :]) == {UNUSED}
    assert "Ġ t" in out["tokenizer.ggml.merges"] and "tokenizer.ggml.scores" not in out
    assert out["tokenizer.ggml.bos_token_id"] == 1 and out["tokenizer.ggml.eos_token_id"] == 2
    assert "tokenizer.ggml.padding_token_id" not in out
    assert out["tokenizer.ggml.add_bos_token"] is False and out["tokenizer.ggml.add_eos_token"] is False
    assert out["tokenizer.chat_template"] == TEMPLATE


def test_a_start_token_is_told():
    assert metadata_of(byte_level(bos=True), 300)["tokenizer.ggml.add_bos_token"] is True


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece(prefix):
    tokenizer = sentence_piece(prefix=prefix)
    out = metadata_of(tokenizer, len(tokenizer))
    tokens, kinds = out["tokenizer.ggml.tokens"], out["tokenizer.ggml.token_type"]
    assert out["tokenizer.ggml.model"] == "llama" and "tokenizer.ggml.merges" not in out
    assert kinds[:3] == [UNKNOWN, CONTROL, CONTROL] and kinds[3:259] == [BYTE] * 256
    assert out["tokenizer.ggml.add_space_prefix"] is prefix
    score = dict(zip(tokens, out["tokenizer.ggml.scores"], strict=True))
    assert score["▁t"] == 0.0 and score["▁t"] > score["▁th"] > score["▁the"]
    assert score["<0x41>"] == 0.0
    # a piece that no merge makes comes after all that some merge makes
    assert score["h"] < min(score[token] for token in tokens if len(token) > 1 and score[token] < 0)


def test_more_than_one_template():
    tokenizer = byte_level(template={"default": "a", "tool_use": "b"})
    out = metadata_of(tokenizer, 300)
    assert out["tokenizer.chat_template"] == "a" and out["tokenizer.chat_template.tool_use"] == "b"
    assert out["tokenizer.chat_templates"] == ["tool_use"]


@pytest.mark.parametrize(
    "pattern, name",
    [
        (pre_tokenizers.Digits(individual_digits=True), "smollm"),
        (None, "gpt-2"),
    ],
)
def test_patterns_by_what_they_do(pattern, name):
    assert metadata_of(byte_level(pattern), 300)["tokenizer.ggml.pre"] == name


def llama_3(whole):
    """A tokenizer that cuts as llama 3's does."""
    cut, _ = next(steps for steps, name in PATTERNS.items() if name == "llama-bpe")
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = byte_level()
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut[1]), "isolated"), step])
    backend.model.ignore_merges = whole
    return tokenizer


def test_words_taken_whole_have_a_name_of_their_own():
    assert metadata_of(llama_3(True), 300)["tokenizer.ggml.pre"] == "llama-bpe"
    assert metadata_of(llama_3(False), 300)["tokenizer.ggml.pre"] == "dbrx"
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.model.ignore_merges = True
    with pytest.raises(UnsupportedModel, match="ignore_merges=True: files that name 'gpt-2'"):
        metadata_of(tokenizer, 300)


def test_an_added_token_has_the_rank_of_its_merge():
    """As gemma's runs of spaces: added, and made by merges besides, which llama.cpp does by scores."""
    tokenizer = sentence_piece()
    tokenizer.add_tokens([AddedToken("▁the", normalized=False), AddedToken("<other>", normalized=False)])
    out = metadata_of(tokenizer, len(tokenizer))
    kind = dict(zip(out["tokenizer.ggml.tokens"], out["tokenizer.ggml.token_type"], strict=True))
    score = dict(zip(out["tokenizer.ggml.tokens"], out["tokenizer.ggml.scores"], strict=True))
    assert kind["▁the"] == kind["<other>"] == USER_DEFINED
    assert score["▁th"] > score["▁the"] > score["▁thi"] and score["<other>"] == min(score.values())


@pytest.mark.parametrize(
    "make, normalizer, kind",
    [
        (byte_level, normalizers.Lowercase(), "Lowercase"),
        (byte_level, normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()]), "NFKC"),
        (byte_level, normalizers.Replace(" ", "▁"), "Replace"),
        (sentence_piece, normalizers.Replace("a", "b"), "Replace"),
        (sentence_piece, normalizers.Prepend("x"), "Prepend"),
        (sentence_piece, normalizers.NFKC(), "NFKC"),
    ],
)
def test_texts_that_are_changed_first(make, normalizer, kind):
    tokenizer = make()
    tokenizer.backend_tokenizer.normalizer = normalizer
    with pytest.raises(UnsupportedModel, match=f"the tokenizer changes texts by {kind}: no place"):
        metadata_of(tokenizer, 400)


def test_texts_that_are_composed_first_are_written():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # qwen2's
    assert metadata_of(tokenizer, 300) == metadata_of(byte_level(), 300)


def test_refusals():
    with pytest.raises(UnsupportedModel, match="cuts text by .*zz.*known are falcon, gpt-2"):
        metadata_of(byte_level(pre_tokenizers.Split(Regex("zz"), "isolated")), 300)
    with pytest.raises(UnsupportedModel, match=r"has a token \d+, the embedding has 100 rows"):
        metadata_of(byte_level(), 100)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UnsupportedModel, match="'WordLevel'; GGUF is written of BPE"):
        metadata_of(PreTrainedTokenizerFast(tokenizer_object=words), 2)
