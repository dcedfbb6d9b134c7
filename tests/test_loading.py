"""Loading through transformers: dtypes, devices, other classes, and what is refused before a model comes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

import hfaccel
from hfaccel.errors import CheckpointError, PatchError
from hfaccel.quant.linear import is_packed
from saved import attention, config_json, logits, patched, reload, stored
from tiny import ids, tiny


@pytest.fixture(scope="module")
def model():
    return patched(tiny("TL", tie_word_embeddings=True), "int4")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """`model` saved in seven shards."""
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder, max_shard_size="32KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 4
    return folder


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def disk(model, *names: str) -> dict[str, str]:
    """A device map with the named modules on disk and the rest on the CPU."""
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{i}" for i in range(model.config.num_hidden_layers)]
    return {part: "disk" if part in names else "cpu" for part in parts}


# What comes back ------------------------------------------------------------------------------------------


def test_a_sharded_folder_gives_a_patched_model(model, folder):
    loaded = reload(model, folder)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.lm_head.weight_scale is loaded.model.embed_tokens.weight_scale
    assert not any(
        p.requires_grad for m in loaded.modules() if is_packed(m) for p in m.parameters(recurse=False)
    )
    prompt = ids(1, 5)
    ours, theirs = (m.generate(prompt, max_new_tokens=6, do_sample=False) for m in (loaded, model))
    assert torch.equal(ours, theirs)
    assert hfaccel.report(loaded).bytes_before == hfaccel.report(model).bytes_before
    hfaccel.patch(loaded, "int4")
    with pytest.raises(PatchError, match="patched with 'int4' already"):
        hfaccel.patch(loaded, "int8")
    with pytest.raises(PatchError, match="loaded from a patched folder"):
        hfaccel.unpatch(loaded)
    with pytest.raises(PatchError, match="quantized"):
        loaded.resize_token_embeddings(600)


def test_the_class_of_a_patched_model_loads(model, folder):
    loaded = type(model).from_pretrained(folder, **attention(model))
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_maps(model, folder, device_map):
    assert torch.equal(logits(reload(model, folder, device_map=device_map)), logits(model))


@pytest.mark.parametrize("names", [("model.layers.1",), ("model.embed_tokens", "lm_head")])
def test_packed_weights_stay_on_disk_where_asked(model, folder, names, tmp_path):
    loaded = reload(model, folder, device_map=disk(model, *names))
    packed = loaded.lm_head if "lm_head" in names else loaded.model.layers[1].mlp.up_proj
    for _ in range(2):
        assert torch.equal(logits(loaded), logits(model)) and packed.weight.is_meta
    with pytest.raises(PatchError, match=f"{names[0]}.*offloaded to .*save into another folder"):
        loaded.save_pretrained(folder)
    loaded.save_pretrained(tmp_path, max_shard_size="32KB")
    again, first = stored(tmp_path), stored(folder)
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)
    assert (tmp_path / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_dtype_changes_only_what_is_not_packed(model, folder):
    loaded = reload(model, folder, dtype=torch.bfloat16)
    for (name, ours), theirs in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        packed = is_packed(loaded.get_submodule(name.rpartition(".")[0]))
        assert torch.equal(ours, theirs if packed else theirs.bfloat16()), name
        assert packed or ours.dtype == torch.bfloat16
    assert logits(loaded).dtype == torch.bfloat16
    assert (logits(loaded) - logits(model)).abs().max() < 0.1 * logits(model).abs().max()


def test_modules_that_fp16_models_keep_in_fp32(tmp_path):
    """T5 loads `wo` in fp32 when the model is fp16; scales of packed weights stay what their layout says."""
    model = patched(tiny("t5", feed_forward_proj="gated-gelu"), "int4")
    model.save_pretrained(tmp_path)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    for name, module in loaded.named_modules():
        if is_packed(module):
            assert torch.equal(module.weight_scale, model.get_submodule(name).weight_scale), name
            assert module.weight_scale.dtype == module.layout.dtype, name


def test_the_base_model_alone(model, folder, tmp_path):
    loaded = AutoModel.from_pretrained(folder, **attention(model))
    x = ids(2, 9)
    expected = model.model(input_ids=x).last_hidden_state
    assert torch.equal(loaded(input_ids=x).last_hidden_state, expected)
    assert {r.name for r in loaded._hfaccel.records} == {
        r.name.removeprefix("model.") for r in model._hfaccel.records if r.name != "lm_head"
    }
    loaded.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, **attention(model))
    assert torch.equal(again(input_ids=x).last_hidden_state, expected)


def test_two_names_of_one_module(tmp_path):
    """One Linear in two layers comes back as one set of tensors; a name the class has not is left out."""
    model = tiny("TL")
    model.model.layers[2].mlp.up_proj = model.model.layers[0].mlp.up_proj
    model.extra = model.model.layers[1].self_attn.q_proj
    patched(model, "int4", keep_original=False)
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    first, second = (loaded.model.layers[i].mlp.up_proj for i in (0, 2))
    for name in ("weight", "weight_scale", "weight_zero"):
        assert getattr(first, name) is getattr(second, name)


class Twice(LlamaForCausalLM):
    """A model whose own code gives one module two names."""

    def __init__(self, config):
        super().__init__(config)
        self.again = self.model.layers[0].mlp.up_proj
        self.post_init()


def test_a_class_that_gives_one_module_two_names(tmp_path):
    model = Twice(tiny("TL").config).eval()
    patched(model, "int4", keep_original=False)
    model.save_pretrained(tmp_path)
    loaded, info = Twice.from_pretrained(tmp_path, output_loading_info=True, **attention(model))
    assert not any(info.values())
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.again is loaded.model.layers[0].mlp.up_proj


# What is refused ------------------------------------------------------------------------------------------


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def edit(folder, change):
    """Apply `change(tensors)` to the shard that holds layer 2's up_proj."""
    name = "model.layers.2.mlp.up_proj.weight"
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard, {"format": "pt"})


UP = "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(f"{UP}.weight"), rf"{UP}.weight is missing"),
        (lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].to(torch.int8)}), rf"{UP}.weight .* is I8"),
        (
            lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][:, :-64].clone()}),
            rf"{UP}.weight .*\[11, 448\], the record says torch.uint8 \[11, 512\]",
        ),
        (
            lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].float()}),
            "weight_scale .* is F32",
        ),
        (
            lambda t: t.update({f"{UP}.bias": torch.zeros(176)}),
            rf"{UP}.bias .* is not a tensor of the record",
        ),
        (lambda t: t.update({"lm_head.weight": torch.zeros(512, 64)}), "lm_head.weight .* is not a tensor"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64)}), "model.norm.weight is both in"),
        (
            lambda t: t.update({k: v.bfloat16() for k, v in t.items() if "norm" in k}),
            "layernorm.weight .* BF16",
        ),
    ],
)
def test_files_that_do_not_match_the_record(copied, change, words):
    edit(copied, change)
    with pytest.raises(CheckpointError, match=words):
        load(copied)


def test_a_truncated_shard(copied):
    shard = sorted(copied.glob("model-*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated or damaged"):
        load(copied)


def test_a_missing_shard(copied):
    shard = sorted(copied.glob("model-*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load(copied)


def set_record(folder, change):
    config = config_json(folder)
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def group_of(record, name):
    return next(group for group in record["packed"] if name in group["modules"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda r: r.update(format=2), "format 2; this hfaccel reads formats up to 1"),
        (lambda r: r["transforms"].append({"name": "gtpq"}), "'gtpq'; known are .*int"),
        (lambda r: group_of(r, UP)["layout"].update(bits=9), "bits=9: known are"),
        (lambda r: group_of(r, UP)["layout"].update(bits=2), r"mlp.*\.weight.* the record says torch.uint8"),
        (lambda r: group_of(r, UP)["modules"].update({UP: "64x176"}), f"{UP}: the record says linear 64x176"),
        (lambda r: group_of(r, UP)["modules"].pop(UP), rf"{UP}\.weight in .* is U8|{UP}.weight_scale"),
        (
            lambda r: group_of(r, UP)["modules"].update({"model.layers.9.mlp.up_proj": "176x64"}),
            "model.layers.9.mlp.up_proj: the record names what LlamaForCausalLM does not have",
        ),
        (
            lambda r: group_of(r, UP)["modules"].update({"model.norm": "8x8"}),
            "model.norm: the record says linear 8x8, the architecture says LlamaRMSNorm",
        ),
        (lambda r: r["tied"].clear(), "lm_head.weight and 1 other tensors are missing"),
        (lambda r: r["dtypes"].update({"model.norm.weight": "float64"}), "model.norm.weight .* is F32"),
        (lambda r: r.pop("packed"), "packed missing"),
    ],
)
def test_records_that_do_not_match_the_model(copied, change, words):
    set_record(copied, change)
    with pytest.raises(PatchError, match=words):
        load(copied)


def test_another_architecture(copied):
    config = config_json(copied)
    config["intermediate_size"] = 180
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="mlp.*the record says linear .*, the architecture says linear"):
        load(copied)


def test_nothing_is_initialised_at_random(folder, tmp_path):
    """A class with a head that is not in the folder, and the base model's folder for a class with a head."""
    with pytest.raises(CheckpointError, match="score.weight is missing"):
        AutoModelForSequenceClassification.from_pretrained(folder)
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM does not have"):
        load(tmp_path)


def test_other_ways_in(model, folder):
    with pytest.raises(CheckpointError, match="state_dict="):
        LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    with pytest.raises(ValueError, match="pre-quantized"):
        LlamaForCausalLM.from_pretrained(
            folder, config=tiny("TL").config, quantization_config=model.config.quantization_config
        )


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "32KB"}])
def test_without_hfaccel_transformers_refuses_and_names_it(recipe, shards, tmp_path, monkeypatch):
    """INT8 codes have the shape of the weights, for which transformers would take them."""
    from transformers.quantizers import auto

    patched(tiny("TL"), recipe).save_pretrained(tmp_path, **shards)
    for table in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(table, "hfaccel")
    for cls in (AutoModelForCausalLM, LlamaForCausalLM, AutoModel):
        with pytest.raises(ValueError, match="packed by hfaccel: `import hfaccel` before from_pretrained"):
            cls.from_pretrained(tmp_path)


def test_the_note_to_transformers_is_in_the_folder_alone(model, folder, copied):
    config = config_json(folder)
    assert "import hfaccel" in config.pop("transformers_weights")
    loaded = reload(model, folder)
    assert not any(hasattr(each.config, "transformers_weights") for each in (model, loaded))
    (copied / "config.json").write_text(json.dumps(config))  # as folders were before
    assert torch.equal(logits(reload(model, copied)), logits(model))
