"""Models out of GGUF files: every architecture, rows of queries and keys, tied heads and bf16."""

import shutil

import gguf
import pytest
import torch
from gguf import quants
from transformers import AutoModelForCausalLM

import hfaccel
from gguf_configs import GEMMA2, GEMMA3, LLAMA3
from gguf_models import logits, of_blocks, written
from hfaccel.formats.gguf_file import GGUFFile
from hfaccel.quant.linear import QuantEmbedding, QuantLinear
from saved import attention
from tiny import ids, tiny

FAMILIES = {
    "llama": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": {},
    "gpt2": {},
    "falcon": {},
    "falcon_mq": {"bias": False},
    "starcoder2": {},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i / 4 for i in range(8)],
    "original_max_position_embeddings": 128,
}
VARIANTS = {
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
}
CASES = {family: (family, config) for family, config in FAMILIES.items()} | VARIANTS


@pytest.mark.parametrize("family, config", CASES.values(), ids=CASES)
def test_fp32_comes_back_bit_for_bit(family, config, tmp_path):
    model = tiny(family, **config)
    found = hfaccel.from_pretrained(written(model, tmp_path / "m.gguf"), **attention(model))
    assert type(found) is type(model) and found.dtype == torch.float32 and not found.training
    assert not hasattr(found, "_hfaccel")
    state, wanted = found.state_dict(), model.state_dict()
    assert list(state) == list(wanted)
    for name, tensor in wanted.items():
        if tensor.dim() == 1 and family.startswith("gemma"):  # 1 + weight is what the file holds
            assert torch.equal(state[name], (tensor + 1.0) - 1.0), name
        else:
            assert torch.equal(state[name], tensor), name
    prompt = ids(2, 21)
    if family.startswith("gemma"):
        torch.testing.assert_close(logits(found, prompt), logits(model, prompt))
    else:
        assert torch.equal(logits(found, prompt), logits(model, prompt))


def by_the_package(model, path, kind="F32"):
    """A llama or qwen2 with the names of the `gguf` package; rows of a llama's Q and K by its converter's
    rule: per head, (2, half) becomes (half, 2), of keys with the count of key heads."""
    config = model.config
    arch = gguf.MODEL_ARCH[config.model_type.upper()]
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads := config.num_attention_heads)
    writer.add_head_count_kv(kv := config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        for part, count in (("q_proj", heads), ("k_proj", kv)):
            if config.model_type == "llama" and stem.endswith(part):
                shape = tensor.shape
                tensor = tensor.reshape(count, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)
        kind_of = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        array = tensor.contiguous().numpy()
        writer.add_tensor(
            f"{names.get_name(stem)}.{suffix}", quants.quantize(array, kind_of), raw_dtype=kind_of
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize(
    "family, heads, kv, size",
    [("llama", 8, 2, 8), ("llama", 8, 8, 8), ("llama", 8, 1, 8), ("llama", 9, 3, 32), ("qwen2", 8, 2, 8)],
)
def test_rows_of_queries_and_keys_under_any_head_counts(family, heads, kv, size, kind, tmp_path):
    """CASES G1: the file by the independent package, the oracle its values where transformers has them."""
    config = {"num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": 96}
    hidden = heads * size if family == "qwen2" else 288
    model = tiny(family, hidden_size=hidden, **config, **({"head_dim": size} if family == "llama" else {}))
    found = hfaccel.from_pretrained(by_the_package(model, tmp_path / "m.gguf", kind), **attention(model))
    if kind == "F16":
        assert found.dtype == torch.float16
    rounded = tiny(family, hidden_size=hidden, **config, **({"head_dim": size} if family == "llama" else {}))
    number = gguf.GGMLQuantizationType[kind]
    for parameter in rounded.parameters():
        if parameter.dim() > 1:
            stored = quants.quantize(parameter.detach().numpy(), number)
            parameter.data = torch.from_numpy(quants.dequantize(stored, number).copy())
    for name, module in found.named_modules():
        if "weight" in module._parameters and name:
            weight = (
                module.dequantize() if isinstance(module, QuantLinear | QuantEmbedding) else module.weight
            )
            wanted = rounded.get_parameter(f"{name}.weight")
            assert torch.equal(weight.float(), wanted.to(weight.dtype).float()), name
    if kind == "F32":
        assert torch.equal(logits(found, ids(2, 9)), logits(model, ids(2, 9)))


def test_transformers_own_loader_gives_the_same_model(tmp_path):
    model = tiny("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    written(model, tmp_path / "m.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    ours = hfaccel.from_pretrained(tmp_path, gguf_file="m.gguf")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


# Tied heads and bf16 (CASES G4) ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("stored", [False, True])
def test_tied_stays_tied_whether_the_head_is_stored_again_or_not(kind, stored, tmp_path):
    path = tmp_path / "m.gguf"
    if kind == "F32":
        written(tiny("llama", tie_word_embeddings=True), path)
    else:
        of_blocks(kind, path, tie_word_embeddings=True)
    if stored:
        with_head(path, lambda rows: rows)
    model = hfaccel.from_pretrained(path)
    assert model.config.tie_word_embeddings
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    assert ends[0].weight.data_ptr() == ends[1].weight.data_ptr()
    packed = kind != "F32"
    assert packed == isinstance(ends[0], QuantEmbedding) == isinstance(ends[1], QuantLinear)
    if packed:
        assert ends[0].weight_scale.data_ptr() == ends[1].weight_scale.data_ptr()
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(hfaccel.from_pretrained(tmp_path / "out"), ids(1, 5)), logits(model, ids(1, 5)))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_another_head_is_kept_and_the_config_says_so(kind, tmp_path):
    path = tmp_path / "m.gguf"
    if kind == "F32":
        written(tiny("llama", tie_word_embeddings=True), path)
    else:
        of_blocks(kind, path, tie_word_embeddings=True)
    with_head(path, lambda rows: rows.flip(0))
    model = hfaccel.from_pretrained(path)
    assert not model.config.tie_word_embeddings
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if kind == "F32":
        assert torch.equal(head.weight, table.weight.flip(0))
    else:
        assert torch.equal(head.dequantize(), table.dequantize().flip(0))


def with_head(path, change):
    """The file with the embedding's rows, changed, as its head."""
    file, writer = GGUFFile(path), gguf.GGUFWriter(path.with_suffix(".again"), "llama")
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
                key, value
            )
    for name, info in file.tensors.items():
        rows = file.rows(name)
        entries = [(name, rows)] + [("output.weight", change(rows))] * (name == "token_embd.weight")
        for entry, found in entries:
            number = gguf.GGMLQuantizationType(info.type.number)
            shape = (*info.shape[:-1], found.shape[-1])
            writer.add_tensor(entry, found.numpy().reshape(shape), raw_shape=shape, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.move(path.with_suffix(".again"), path)


def test_bfloat16_is_bit_identical(tmp_path):
    model = tiny("llama").bfloat16()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, :4] = torch.tensor([1e-39, 7e4, -0.0, -1e-39])
    found = hfaccel.from_pretrained(written(model, tmp_path / "m.gguf", "BF16"))
    assert found.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name].view(torch.int16), tensor.view(torch.int16)), name
