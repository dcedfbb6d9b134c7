"""hfaccel.from_pretrained: folders, hub ids, GGUF files, recipes and bitsandbytes' configurations."""

import json
import shutil

import gguf
import pytest
import torch
from transformers import BertForMaskedLM, BitsAndBytesConfig, LlamaForCausalLM, LlamaModel

import hfaccel
from hfaccel.bitsandbytes import translated
from hfaccel.checkpoint import SavedConfig
from hfaccel.errors import AlreadyPatched, CheckpointError, PatchError, UnknownName
from saved import attention, config_json, logits, patched
from tiny import tiny


@pytest.fixture(scope="module")
def original():
    return tiny("TL")


@pytest.fixture(scope="module")
def plain(original, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    original.save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="module")
def packed(original, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    patched(tiny("TL"), "int4+kv8").save_pretrained(folder)
    return folder


def test_a_plain_folder(plain, original):
    model = hfaccel.from_pretrained(plain, **attention(original))
    assert type(model) is LlamaForCausalLM and not model.training
    assert torch.equal(logits(model), logits(original))
    half = hfaccel.from_pretrained(str(plain), dtype=torch.bfloat16, device="cpu")
    assert half.dtype == torch.bfloat16 and half.device.type == "cpu"


def test_the_class_that_the_config_names(tmp_path):
    tiny("bert").save_pretrained(tmp_path / "bert")
    assert type(hfaccel.from_pretrained(tmp_path / "bert")) is BertForMaskedLM
    tiny("TL").model.save_pretrained(tmp_path / "base")
    assert type(hfaccel.from_pretrained(tmp_path / "base")) is LlamaModel


def test_with_a_recipe(plain, original):
    expected = logits(patched(tiny("TL"), "int4"))
    for recipe in ("int4", hfaccel.RTN(bits=4), [hfaccel.RTN(bits=4)]):
        model = hfaccel.from_pretrained(plain, recipe, device="cpu", **attention(original))
        assert torch.equal(logits(model), expected)
    hfaccel.unpatch(model)  # its originals are in the folder
    assert torch.equal(logits(model), logits(original))


def test_a_patched_folder(packed, original):
    model = hfaccel.from_pretrained(packed, **attention(original))
    assert torch.equal(logits(model), logits(patched(tiny("TL"), "int4")))
    assert model._hfaccel.origin == "loaded"
    again = hfaccel.from_pretrained(packed, "int4+kv8", **attention(original))
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(AlreadyPatched, match=r"saved as 'int4\+kv8'"):
        hfaccel.from_pretrained(packed, "int8")


def test_runtime_choices_of_a_folder_give_way_to_a_recipe(original, tmp_path):
    patched(tiny("TL"), "kv8").save_pretrained(tmp_path)
    assert hfaccel.from_pretrained(tmp_path)._hfaccel.config.to_recipe() == "kv8"
    model = hfaccel.from_pretrained(tmp_path, "int8", **attention(original))
    assert model._hfaccel.config.to_recipe() == "int8" and not hasattr(model.config, "hfaccel")
    assert torch.equal(logits(model), logits(patched(tiny("TL"), "int8")))


def test_a_hub_id_from_the_cache(plain, original, tmp_path):
    place = tmp_path / "models--somebody--model"
    shutil.copytree(plain, place / "snapshots" / ("0" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    model = hfaccel.from_pretrained(
        "somebody/model", "int8", cache_dir=tmp_path, local_files_only=True, **attention(original)
    )
    assert torch.equal(logits(model), logits(patched(tiny("TL"), "int8")))


# GGUF ------------------------------------------------------------------------------------------------------

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model, path) -> None:
    """A llama as F32 GGUF, by the independent package; rows of Q and K in GGUF's rotary order."""
    config = model.config
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in _NAMES.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    for ours, theirs in names.items():
        weight = model.get_submodule(ours).weight.detach()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if ours.endswith(part):
                weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file(original, tmp_path):
    write_gguf(original, tmp_path / "model.gguf")
    model = hfaccel.from_pretrained(tmp_path / "model.gguf", **attention(original))
    assert type(model) is LlamaForCausalLM and not getattr(model, "is_quantized", False)
    assert torch.equal(logits(model), logits(original))
    model = hfaccel.from_pretrained(tmp_path / "model.gguf", "int8", **attention(original))
    assert torch.equal(logits(model), logits(patched(tiny("TL"), "int8")))
    with pytest.raises(PatchError, match="not kept"):
        hfaccel.unpatch(model)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(hfaccel.from_pretrained(tmp_path / "out", **attention(model))), logits(model))


# bitsandbytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [BitsAndBytesConfig(load_in_8bit=True), {"load_in_8bit": True}])
def test_bitsandbytes_int8(plain, original, given):
    model = hfaccel.from_pretrained(plain, quantization_config=given, **attention(original))
    assert model._hfaccel.config.to_recipe() == "int8"
    assert torch.equal(logits(model), logits(patched(tiny("TL"), "int8")))


def test_bitsandbytes_skips_modules(plain, original):
    given = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "down_proj", "layers.1"])
    model = hfaccel.from_pretrained(plain, quantization_config=given, **attention(original))
    left = {name for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert left == {"lm_head"} | {f"model.layers.{i}.mlp.down_proj" for i in range(4)} | {
        f"model.layers.1.{name}"
        for name in (*(f"self_attn.{n}_proj" for n in "qkvo"), "mlp.gate_proj", "mlp.up_proj")
    }


def test_bitsandbytes_nf4(plain, original):
    given = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = hfaccel.from_pretrained(plain, quantization_config=given, **attention(original))
    assert model._hfaccel.config.to_recipe() == "nf4"
    assert torch.equal(logits(model), logits(patched(tiny("TL"), "nf4")))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load_in_8bit": True, "llm_int8_threshold": 4.0}, "llm_int8_threshold=4.0 has no counterpart"),
        ({"load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight=True has no"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
            "bnb_4bit_compute_dtype=bfloat16 has no counterpart",
        ),
        ({"load_in_8bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}, ""),  # of the other mode
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_threshold": 6}, ""),
    ],
)
@pytest.mark.parametrize("form", [dict, BitsAndBytesConfig])
def test_bitsandbytes_options_without_counterpart_are_named(options, said, form, caplog):
    given = form(**{key: float(v) if type(v) is int else v for key, v in options.items()})
    step, _ = translated({"quantization_config": given}, None)
    assert step == ("int8" if "load_in_8bit" in options else "nf4")
    assert said in caplog.text and bool(said) == ("counterpart" in caplog.text)


def test_bitsandbytes_that_hfaccel_has_not(plain):
    with pytest.raises(UnknownName, match="unknown option 'llm_int8_treshold'; known are .*threshold"):
        given = {"load_in_8bit": True, "llm_int8_treshold": 4.0}
        hfaccel.from_pretrained(plain, quantization_config=given)
    with pytest.raises(PatchError, match="means fp4, of which hfaccel knows nf4 alone"):
        hfaccel.from_pretrained(plain, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    with pytest.raises(PatchError, match="asks for nothing"):
        hfaccel.from_pretrained(plain, quantization_config=BitsAndBytesConfig())


# What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, kwargs, error, words",
    [
        (("int5",), {}, UnknownName, "int5"),
        (("int8",), {"quantization_config": {"load_in_8bit": True}}, PatchError, "quantized once"),
        ((), {"device": "cpu", "device_map": "auto"}, PatchError, "one of them"),
    ],
)
def test_arguments_that_contradict(plain, args, kwargs, error, words):
    with pytest.raises(error, match=words):
        hfaccel.from_pretrained(plain, *args, **kwargs)


@pytest.mark.parametrize(
    ("name", "hint"), [("dmeo", " \\(did you mean 'demo'\\?\\)"), ("nope_folder_x", ""), ("some/where", "")]
)
def test_a_name_that_nobody_knows_is_said_with_the_choices(name, hint):
    with pytest.raises(
        OSError, match=f"^no model {name!r}{hint}: known are a folder, a hub id, a .gguf file"
    ):
        hfaccel.from_pretrained(name)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "nowhere/", "/nowhere/m.gguf", "model.gguf"])
def test_places_that_do_not_exist(name):
    with pytest.raises(PatchError, match="no such"):
        hfaccel.from_pretrained(name)


def break_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    return "index.json is damaged"


def break_map(folder):
    (folder / "model.safetensors.index.json").write_text("[]")
    return "index.json is damaged"


def break_config(folder):
    (folder / "config.json").write_text('{"model_type": "lla')
    return "config.json is damaged"


def remove_shard(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    return f"{shard.name} is missing"


def truncate_shard(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    return "weights are truncated or damaged"


def newer_runtime(folder):
    config = config_json(folder) | {"hfaccel": {"format": 2, "transforms": []}}
    (folder / "config.json").write_text(json.dumps(config))
    return "hfaccel is of format 2"


def newer_packed(folder):
    """What a newer format calls its methods is not known here; that it is newer is what must be said."""
    record = SavedConfig.empty() | {"format": 2, "transforms": [{"name": "int9"}], "more": {}}
    config = config_json(folder) | {"quantization_config": record}
    (folder / "config.json").write_text(json.dumps(config))
    return "format 2; this hfaccel reads formats up to 1: install a newer one"


def odd_runtime(folder):
    (folder / "config.json").write_text(json.dumps(config_json(folder) | {"hfaccel": ["kv8"]}))
    return r"hfaccel=\['kv8'\]"


@pytest.mark.parametrize(
    "damage",
    [
        break_index,
        break_map,
        break_config,
        remove_shard,
        truncate_shard,
        newer_runtime,
        newer_packed,
        odd_runtime,
    ],
)
def test_damaged_folders(plain, tmp_path, damage):
    folder = shutil.copytree(plain, tmp_path / "copy")
    with pytest.raises(CheckpointError, match=damage(folder)):
        hfaccel.from_pretrained(folder)
