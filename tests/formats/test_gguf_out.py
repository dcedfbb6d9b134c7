import logging

import gguf
import pytest
import torch
from gguf import quants
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfaccel
from hfaccel.errors import PatchError, UnknownName, UnsupportedModel
from hfaccel.formats import gguf_out
from hfaccel.quant.linear import ScaledLinear, codes_of
from tiny import ids, tiny
from vocabularies import byte_level, sentence_piece

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "phi3": {},
    "gpt2": {},
    "falcon": {},
    "starcoder2": {},
}
# `gguf`'s own table of names knows neither of these as transformers has them now.
FUSED = ("gate_up_proj", "down_proj")


def exported(model, variant, path, **more):
    more.setdefault("tokenizer", None)
    gguf_out.write(model, more.pop("tokenizer"), variant, path, **more)
    reader = gguf.GGUFReader(path)
    return {t.name: t for t in reader.tensors}, {k: f.contents() for k, f in reader.fields.items()}


def values(tensor):
    return torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_is_there_in_fp32(family, tmp_path):
    """Names by the `gguf` package's table; values as sorted sets, so that no order is taken on trust."""
    model = tiny(family, **FAMILIES[family])
    tensors, _ = exported(model, "F32", tmp_path / "m.gguf")
    assert {t.tensor_type.name for t in tensors.values()} == {"F32"}
    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == _architecture(family)),
        model.config.num_hidden_layers,
    )
    seen = 0
    for name, parameter in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        if family == "mixtral" and (suffix in FUSED or "mlp.gate" in name):
            continue
        if family == "falcon" and ".ln_" in name:
            continue
        found = names.get_name(stem)
        assert found is not None, name
        value = values(tensors[f"{found}.{suffix}"])
        if family.startswith("gemma") and "norm" in name:
            parameter = parameter + 1
        assert torch.equal(value.flatten().sort().values, parameter.detach().flatten().sort().values), name
        seen += 1
    assert seen >= 10


def _architecture(family):
    return {"mistral": "llama", "mixtral": "llama"}.get(family, family)


@pytest.mark.parametrize("heads, kv, size", [(8, 2, 8), (8, 8, 8), (8, 1, 8), (9, 3, 16), (4, 2, 32)])
def test_rows_of_queries_and_keys_pair_the_halves_of_their_own_heads(heads, kv, size, tmp_path):
    config = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": size, "hidden_size": 72}
    model = tiny("llama", **config)
    tensors, fields = exported(model, "F32", tmp_path / "m.gguf")
    attention = model.model.layers[1].self_attn
    for name, count, module in (
        ("attn_q", heads, attention.q_proj),
        ("attn_k", kv, attention.k_proj),
    ):
        rows = values(tensors[f"blk.1.{name}.weight"])
        for head in range(count):
            for j in range(size // 2):  # neighbours in the file, half a head apart here
                first = rows[head * size + 2 * j], rows[head * size + 2 * j + 1]
                ours = module.weight[head * size + j], module.weight[head * size + size // 2 + j]
                assert torch.equal(first[0], ours[0]) and torch.equal(first[1], ours[1])
    assert torch.equal(values(tensors["blk.1.attn_v.weight"]), attention.v_proj.weight)
    assert fields["llama.attention.head_count_kv"] == kv
    assert fields["llama.attention.key_length"] == fields["llama.rope.dimension_count"] == size


def test_a_linear_that_scales_its_inputs_is_written_as_what_it_multiplies_by(tmp_path):
    model = tiny("gpt2", n_inner=128)
    rows = [torch.arange(40) % 97, torch.arange(50) * 3 % 89]
    hfaccel.patch(model, "awq4-g32-sym", calibration=rows, progress=False)
    module = model.transformer.h[0].mlp.c_proj
    assert isinstance(module, ScaledLinear)
    tensors, _ = exported(model, "F32", tmp_path / "whole.gguf")
    assert torch.equal(values(tensors["blk.0.ffn_down.weight"]), module.dequantize())
    tensors, _ = exported(model, "Q4_0", tmp_path / "packed.gguf")
    found, wanted = values(tensors["blk.0.ffn_down.weight"]), module.dequantize()
    assert float((found - wanted).norm() / wanted.norm()) < 0.1  # its codes alone are off by the scales
    assert torch.equal(values(tensors["blk.0.ffn_up.weight"]), model.transformer.h[0].mlp.c_fc.dequantize())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("variant", ["F32", "F16", "Q8_0", "Q4_1", "Q4_K_M"])
def test_transformers_own_loader_reads_it(family, variant, tmp_path):
    head = 128 if family == "qwen3" else 64  # its qwen3 knows no other size
    sizes = {"hidden_size": 256, "head_dim": head, "intermediate_size": 288, "vocab_size": 300}
    model = tiny(family, attn="sdpa", **sizes)
    tokenizer = byte_level()
    exported(model, variant, tmp_path / "m.gguf", tokenizer=tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    # Relative: of fp16; step / sqrt(12) where 32 normal weights span 4.2 deviations; biases and norms exact.
    most = {"F32": 0.0, "F16": 3e-4, "Q8_0": 6e-3, "Q4_1": 0.081, "Q4_K_M": 0.081}[variant]
    for name, parameter in model.named_parameters():
        limit = most * parameter.norm() if parameter.dim() > 1 else 0.0
        assert (loaded.get_parameter(name) - parameter).norm() <= limit, name
    if variant == "F32":
        prompt = ids(2, 9)
        with torch.no_grad():
            torch.testing.assert_close(loaded(prompt).logits, model(prompt).logits, rtol=1e-5, atol=1e-5)
    if family == "llama":
        assert AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf").encode("then hello 2026") == (
            tokenizer.encode("then hello 2026")
        )


@pytest.mark.parametrize("variant", ["Q8_0", "Q4_0", "Q4_1", "Q5_K_M", "Q4_K_M", "Q6_K"])
def test_k_types_where_256_divides_and_their_stand_ins_elsewhere(variant, tmp_path):
    model = tiny("llama", hidden_size=256, intermediate_size=320, num_hidden_layers=8, vocab_size=64)
    tensors, fields = exported(model, variant, tmp_path / "m.gguf")
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {kinds["output_norm.weight"], kinds["blk.0.attn_norm.weight"]} == {"F32"}
    wide, narrow = {
        "Q5_K_M": ("Q5_K", "Q5_1"),
        "Q4_K_M": ("Q4_K", "Q5_0"),
        "Q6_K": ("Q6_K", "Q8_0"),
    }.get(variant, (variant, variant))
    assert kinds["blk.1.attn_q.weight"] == wide and kinds["blk.1.ffn_down.weight"] == narrow
    assert fields["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{variant}"]
    assert fields["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    most = {"Q8_0": 0.01, "Q6_K": 0.03, "Q5_K_M": 0.06}.get(variant, 0.13)
    weight = model.model.layers[1].mlp.up_proj.weight
    assert (values(tensors["blk.1.ffn_up.weight"]) - weight).norm() < most * weight.norm()


def test_metadata_and_tokenizer(tmp_path):
    model = tiny("llama", vocab_size=340)
    model.generation_config.eos_token_id = [2, 3]
    _, fields = exported(model, "Q8_0", tmp_path / "m.gguf", tokenizer=sentence_piece())
    assert fields["general.architecture"] == "llama" and fields["general.type"] == "model"
    assert fields["llama.block_count"] == 2 and fields["llama.vocab_size"] == 340
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(model.config.rms_norm_eps)
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.scores"]) == 340
    assert fields["tokenizer.ggml.eos_token_id"] == 2 and fields["tokenizer.ggml.eot_token_id"] == 3
    assert fields["tokenizer.chat_template"].startswith("{% for m in messages %}")


@pytest.mark.parametrize("recipe, variant", [("int4-sym-g32", "Q4_0")])
def test_a_packed_grid_is_written_code_for_code(recipe, variant, tmp_path, caplog):
    model = tiny("llama", hidden_size=64, intermediate_size=96)
    hfaccel.patch(model, f"{recipe}+head16")
    with caplog.at_level(logging.WARNING, logger="hfaccel"):
        tensors, _ = exported(model, variant, tmp_path / "m.gguf")
    assert "dequantized" not in caplog.text
    down = model.model.layers[0].mlp.down_proj
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == variant
    assert torch.equal(values(tensors["blk.0.ffn_down.weight"]), down.dequantize())
    block = torch.from_numpy(tensors["blk.0.ffn_down.weight"].data.copy()).view(-1, 18)
    codes = torch.cat([block[:, 2:] & 15, block[:, 2:] >> 4], 1).view(down.size)
    assert torch.equal(codes, codes_of(down))
    keys = model.model.layers[0].self_attn.k_proj.dequantize().sort(0).values
    assert torch.equal(values(tensors["blk.0.attn_k.weight"]).sort(0).values, keys)


# Not of mixtral in Q4_K_M and Q5_K_M: experts whose matrices are of two types are dequantized when loaded.
BACK = [
    (family, variant)
    for family in ("llama", "qwen2", "gemma2", "gpt2", "mixtral")
    for variant in ("F32", "Q8_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K")
    if family != "mixtral" or not variant.endswith("_M")
]


@pytest.mark.parametrize("family, variant", BACK)
def test_what_was_loaded_packed_is_written_back_byte_for_byte(family, variant, tmp_path, caplog):
    inner = {"gpt2": "n_inner"}.get(family, "intermediate_size")
    sizes = {"hidden_size": 256, inner: 512, "num_hidden_layers": 2, "vocab_size": 300}
    model = tiny(family, **{**sizes, **FAMILIES[family]})
    tensors, fields = exported(model, variant, tmp_path / "a.gguf", tokenizer=byte_level())
    loaded = hfaccel.from_pretrained(str(tmp_path / "a.gguf"), dtype=torch.float32)
    with caplog.at_level(logging.WARNING, logger="hfaccel"):
        again, same = exported(loaded, variant, tmp_path / "b.gguf", tokenizer=byte_level())
    assert "dequantized" not in caplog.text
    assert same == fields and again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].tensor_type == tensor.tensor_type, name
        assert again[name].data.tobytes() == tensor.data.tobytes(), name


def test_other_grids_are_dequantized_and_the_log_says_so(tmp_path, caplog):
    model = tiny("llama", hidden_size=64, intermediate_size=96)
    hfaccel.patch(model, "int4-g64")
    with caplog.at_level(logging.WARNING, logger="hfaccel"):
        tensors, _ = exported(model, "F32", tmp_path / "m.gguf")
    assert "15 of 15 packed matrices have a grid of their own and are dequantized" in caplog.text
    down = model.model.layers[0].mlp.down_proj
    assert torch.equal(values(tensors["blk.0.ffn_down.weight"]), down.dequantize())


def test_calibration_lowers_the_error_of_what_the_layers_put_out(tmp_path):
    model = tiny("llama", hidden_size=64, intermediate_size=128)
    with torch.no_grad():  # some channels count more
        model.model.layers[1].input_layernorm.weight[::5] *= 20
    data = ids(4, 64)
    plain, _ = exported(model, "Q4_1", tmp_path / "a.gguf")
    weighted, _ = exported(model, "Q4_1", tmp_path / "b.gguf", calibration=data)
    seen = []
    module = model.model.layers[1].self_attn.v_proj
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, 64)))
    with torch.no_grad():
        model(data)
    hook.remove()

    def error(tensors):
        return ((values(tensors["blk.1.attn_v.weight"]) - module.weight) @ seen[0].t()).square().sum()

    assert error(weighted) < 0.7 * error(plain)


@pytest.mark.parametrize("tie", [True, False])
def test_a_tied_head_is_stored_once(tie, tmp_path):
    model = tiny("llama", tie_word_embeddings=tie)
    tensors, _ = exported(model, "F32", tmp_path / "m.gguf")
    assert ("output.weight" in tensors) is not tie
    # a head that differs is kept, whatever the config said before
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    tensors, _ = exported(model, "F32", tmp_path / "n.gguf")
    assert torch.equal(values(tensors["output.weight"]), model.lm_head.weight)


def test_bf16_values_come_through(tmp_path):
    model = tiny("llama").to(torch.bfloat16)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, :3] = torch.tensor([1e-39, 7e4, -0.0], dtype=torch.bfloat16)
    tensors, _ = exported(model, "BF16", tmp_path / "m.gguf")
    found = torch.from_numpy(tensors["blk.0.ffn_up.weight"].data.copy()).view(torch.int16)
    assert torch.equal(found, weight.view(torch.int16))
    with pytest.raises(PatchError, match="layers.0.mlp.up_proj.weight: fp16 ends at 65504"):
        exported(model, "F16", tmp_path / "n.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_adapters_are_merged(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = tiny("llama")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["up_proj"], r=4, init_lora_weights=False))
    tensors, _ = exported(wrapped.get_base_model(), "F32", tmp_path / "m.gguf")
    merged = wrapped.merge_and_unload().model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(values(tensors["blk.1.ffn_up.weight"]), merged, rtol=1e-5, atol=1e-6)


def test_a_gemma2_has_no_head_but_its_embedding(tmp_path):
    model = tiny("gemma2", query_pre_attn_scalar=32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    with pytest.raises(UnsupportedModel, match="no copy of the embedding: a GGUF gemma2 has no other"):
        gguf_out.write(model, None, "F32", tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "count, label",
    [(134_515_008, "135M"), (7_241_732_096, "7.2B"), (46_702_792_704, "47B"), (1234, "1.2K"), (7, None)],
)
def test_labels_of_sizes_have_two_digits_or_more(count, label):
    """As the `gguf` package rounds."""
    assert gguf_out._general(tiny("llama"), "F32", count).get("general.size_label") == label
    if label:
        assert gguf.model_weight_count_rounded_notation(count) == label


def test_refusals_leave_nothing_behind(tmp_path):
    model = tiny("llama")
    with pytest.raises(UnknownName, match="'Q3_K': known are F32"):
        gguf_out.write(model, None, "Q3_K", tmp_path / "m.gguf")
    with pytest.raises(UnknownName, match="a type is missing"):
        gguf_out.write(model, None, None, tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModel, match="'bloom'; known are falcon, gemma2"):
        gguf_out.write(tiny("bloom"), None, "F32", tmp_path / "m.gguf")
    with pytest.raises(PatchError, match="is a folder"):
        gguf_out.write(model, None, "F32", tmp_path)
    with pytest.raises(PatchError, match="nowhere is no folder"):
        gguf_out.write(model, None, "F32", tmp_path / "nowhere" / "m.gguf")
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(PatchError, match="layers.1.mlp.up_proj.weight: .* has it, this model does not"):
        gguf_out.write(model, None, "F32", tmp_path / "m.gguf")
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(99, 64, bias=False)
    with pytest.raises(PatchError, match=r"layers.1.mlp.down_proj.weight is \[64, 99\]"):
        gguf_out.write(model, None, "F32", tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_the_former_file(tmp_path, monkeypatch):
    model, path = tiny("llama"), tmp_path / "m.gguf"
    gguf_out.write(model, None, "F32", path)
    before = path.read_bytes()

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hfaccel.formats.kquants.quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gguf_out.write(model, None, "Q8_0", path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
