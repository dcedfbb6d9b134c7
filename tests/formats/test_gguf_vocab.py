import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfaccel.errors import UnsupportedModel
from hfaccel.formats.gguf_vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, metadata_of
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


def test_refusals():
    with pytest.raises(UnsupportedModel, match="cuts text by .*zz.*known are falcon, gpt-2"):
        metadata_of(byte_level(pre_tokenizers.Split(Regex("zz"), "isolated")), 300)
    with pytest.raises(UnsupportedModel, match=r"has a token \d+, the embedding has 100 rows"):
        metadata_of(byte_level(), 100)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UnsupportedModel, match="'WordLevel'; GGUF is written of BPE"):
        metadata_of(PreTrainedTokenizerFast(tokenizer_object=words), 2)
