"""GGUF files and arguments that are refused: metadata, names and shapes of tensors."""

import pytest
from transformers import GPT2LMHeadModel, LlamaForCausalLM

import hfaccel
from gguf_bytes import File, Tensor
from gguf_models import written
from hfaccel.errors import PatchError, UnsupportedModel
from hfaccel.formats.gguf_file import GGUFError, GGUFFile
from tiny import tiny


def rewritten(path, metadata=None, drop=(), rename=None, shapes=None):
    """The model in `path` with other metadata, without tensors or with other names or shapes of some."""
    file = GGUFFile(path)
    out = File(alignment=32)
    out.metadata = [(k, v) for k, v in (file.metadata | (metadata or {})).items() if v is not None]
    for name, info in file.tensors.items():
        if name not in drop:
            data = file.rows(name).numpy().tobytes()
            shape = (shapes or {}).get(name, info.shape)
            out.tensors.append(Tensor((rename or {}).get(name, name), shape, info.type.number, data))
    target = path.with_name("changed.gguf")
    target.write_bytes(out.bytes())
    return target


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    return written(
        tiny("llama", hidden_size=32, intermediate_size=64, vocab_size=64, num_attention_heads=2), path
    )


BAD = {
    "architecture": (
        {"general.architecture": "mamba"},
        UnsupportedModel,
        "'mamba'; known are falcon, gemma2",
    ),
    "no architecture": ({"general.architecture": None}, UnsupportedModel, "None; known are"),
    "architecture of another type": ({"general.architecture": 3}, UnsupportedModel, "is 3; known"),
    "missing key": ({"llama.block_count": None}, GGUFError, "llama.block_count is missing"),
    "more blocks": ({"llama.block_count": 3}, GGUFError, "llama.block_count is 3, tensor blk.2.attn_norm"),
    "absurd blocks": ({"llama.block_count": 2**31 - 1}, GGUFError, "llama.block_count is 2147483647, tensor"),
    "fewer blocks": ({"llama.block_count": 1}, GGUFError, "tensor blk.1.* and 8 others: not one that"),
    "no heads": ({"llama.attention.head_count": 0}, GGUFError, "llama.attention.head_count is 0"),
    "heads as a list": ({"llama.attention.head_count": [2, 2]}, GGUFError, "head_count is 2 values"),
    "heads as text": ({"llama.attention.head_count": "2"}, GGUFError, "head_count is '2'"),
    "other heads": ({"llama.attention.head_count": 4}, GGUFError, "tensor blk.0.attn_q.weight is"),
    "other width": ({"llama.embedding_length": 64}, GGUFError, "tensor token_embd.weight is"),
    "absurd width": ({"llama.embedding_length": 2**31 - 2}, GGUFError, "tensor .* is"),
    "absurd head": (
        {"llama.attention.key_length": 2**30, "llama.attention.value_length": 2**30},
        (GGUFError, UnsupportedModel),
        "key_length|rope.dimension_count|tensor",
    ),
    "heads that do not divide": (
        {"llama.attention.head_count": 3, "llama.attention.head_count_kv": 3},
        GGUFError,
        "llama cannot be made of its metadata: .*not a multiple of the number of attention heads",
    ),
    "odd head": (
        {f"llama.{key}": 15 for key in ("attention.key_length", "attention.value_length")}
        | {"llama.rope.dimension_count": 15},
        UnsupportedModel,
        "heads of size 15: rotary positions want an even one",
    ),
    "absurd heads of absurd size": (
        {f"llama.{key}": 2**30 for key in ("attention.key_length", "attention.value_length")}
        | {"llama.rope.dimension_count": 2**30, "llama.attention.head_count": 16},
        GGUFError,
        "tensor blk.0.attn_q.weight is",
    ),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, GGUFError, "rms_epsilon is nan"),
    "theta": ({"llama.rope.freq_base": float("inf")}, GGUFError, "freq_base is inf"),
    "rope type": ({"llama.rope.scaling.type": "spiral"}, UnsupportedModel, "scaling.type is 'spiral'"),
    "one of several": ({"split.count": 3}, GGUFError, "split.count: one of several files"),
    "token id": ({"tokenizer.ggml.eos_token_id": "2"}, GGUFError, "eos_token_id is '2'"),
}


@pytest.mark.parametrize("metadata, error, words", BAD.values(), ids=BAD)
def test_metadata_that_is_wrong_is_named(sound, metadata, error, words):
    with pytest.raises(error, match=f"changed.gguf: .*({words})"):
        hfaccel.from_pretrained(rewritten(sound, metadata))


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.rope.scaling.type",
        "llama.attention.head_count",
        "llama.rope.freq_base",
        "tokenizer.ggml.eos_token_id",
    ],
)
@pytest.mark.parametrize("value", ["long " * 100_000, [7] * 100_000], ids=["text", "list"])
def test_a_message_does_not_hold_the_whole_value(sound, key, value):
    with pytest.raises(PatchError, match=f"changed.gguf: {key} is ") as caught:
        hfaccel.from_pretrained(rewritten(sound, {key: value}))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_a_missing_tensor_is_named_and_nothing_is_drawn_at_random(sound, name):
    with pytest.raises(GGUFError, match=f"changed.gguf: tensor {name} is missing"):
        hfaccel.from_pretrained(rewritten(sound, drop=(name,)))


def test_a_missing_head_means_a_tied_one(sound):
    model = hfaccel.from_pretrained(rewritten(sound, drop=("output.weight",)))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tensor_that_the_model_has_not_is_named(sound):
    with pytest.raises(GGUFError, match="tensor blk.0.attn_q.lora: not one that a llama has"):
        hfaccel.from_pretrained(rewritten(sound, rename={"blk.0.attn_q.weight": "blk.0.attn_q.lora"}))


@pytest.mark.parametrize(
    "kwargs, words",
    [({"dtype": "int8"}, "'int8'"), ({"config": LlamaForCausalLM}, "config=: m.gguf says itself")],
)
def test_arguments_that_do_not_fit(sound, kwargs, words):
    with pytest.raises(PatchError, match=words):
        hfaccel.from_pretrained(sound, **kwargs)


def test_a_file_that_was_joined_from_several_is_read(sound):
    model = hfaccel.from_pretrained(rewritten(sound, {"split.count": 0, "split.no": 0}))
    assert type(model) is LlamaForCausalLM


@pytest.mark.parametrize("model, ids", [("llama", (1, 2, None)), ("gpt2", (None, None, None))])
def test_ends_of_a_file_that_names_none(sound, model, ids):
    config = hfaccel.from_pretrained(rewritten(sound, {"tokenizer.ggml.model": model})).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == ids


@pytest.mark.parametrize("name", ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
@pytest.mark.parametrize("variant", ["F32", "Q8_0"])
def test_experts_that_are_not_there_or_no_experts(name, variant, tmp_path):
    model = tiny("mixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64)
    path, tensor = written(model, tmp_path / "m.gguf", variant), f"blk.0.{name}.weight"
    with pytest.raises(GGUFError, match=f"changed.gguf: tensor {tensor} is missing"):
        hfaccel.from_pretrained(rewritten(path, drop=(tensor,)))
    with pytest.raises(GGUFError, match=rf"tensor {tensor} is \[128, 32\]: experts have three dimensions"):
        hfaccel.from_pretrained(rewritten(path, shapes={tensor: (128, 32)}))


def test_a_gpt2_with_an_absurd_context_allocates_nothing(tmp_path):
    path = written(tiny("gpt2"), tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match="tensor position_embd.weight is"):
        hfaccel.from_pretrained(rewritten(path, {"gpt2.context_length": 2**30}))
    assert type(hfaccel.from_pretrained(path)) is GPT2LMHeadModel
