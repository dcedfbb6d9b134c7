"""adapters.py: PEFT's folders as they are; what cannot be served is refused by name."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from hfaccel.lora.adapters import read_adapter
from hfaccel.lora.folder import CONFIG, HEADER_BYTES, WEIGHTS, BadAdapter
from lora_folders import LINEARS, MLP, adapter
from tiny import tiny


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture
def folder(model, tmp_path):
    adapter(model, tmp_path / "x", r=4)
    return tmp_path / "x"


def settings(folder, **changes):
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))


def tensors(folder, change):
    found = load_file(folder / WEIGHTS)
    change(found)
    save_file(found, folder / WEIGHTS)


def first(found, side="A"):
    return next(key for key in found if key.endswith(f"lora_{side}.weight"))


@pytest.mark.parametrize("stabilized", [False, True])
def test_scales_are_pefts(model, tmp_path, stabilized):
    """CASES L3: rank-stabilized, per-module ranks and alphas, r 1; PEFT's own numbers are the oracle."""
    peft = adapter(
        model,
        tmp_path / "x",
        r=16,
        targets=LINEARS,
        use_rslora=stabilized,
        lora_alpha=24,
        rank_pattern={"up_proj": 1, r"layers\.1\.self_attn\.q_proj": 8},
        alpha_pattern={"mlp.down_proj": 3, "v_proj": 5},
    )
    found = read_adapter("x", tmp_path / "x", model)
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in peft.named_modules()
        if hasattr(module, "lora_A")
    }
    assert found.parts.keys() == layers.keys() and len(layers) == 7 * model.config.num_hidden_layers
    for name, layer in layers.items():
        part = found.parts[name]
        assert math.isclose(part.scale, layer.scaling["default"]) and part.rank == layer.r["default"]
    assert found.rank == 16 and {part.rank for part in found.parts.values()} == {1, 8, 16}


def test_numbers_are_given_once(model, folder):
    assert read_adapter("x", folder, model).number != read_adapter("x", folder, model).number


def test_no_pickles(model, folder):
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(BadAdapter, match="adapter 'x'.*adapter_model.bin is a pickle"):
        read_adapter("x", folder, model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora.*DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"r": 8}, "has rank 4, adapter_config.json says 8"),
        ({"r": "4"}, "r in adapter_config.json is '4'"),
        ({"lora_alpha": float("nan")}, "lora_alpha .* is nan"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj has rank 4, .* says 2"),
        ({"rank_pattern": {"(": 2}}, r"pattern '\('"),
        ({"alpha_pattern": [1]}, r"alpha_pattern .* is \[1\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'.*other weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"use_qalora": True}, "use_qalora.*QALoRA"),
        ({"use_something_new": 1}, "use_something_new .* is not known"),
        ({"lora_alpha": 10**400}, "lora_alpha .* not a number"),
        ({"lora_alpha": 1e12}, "scaled by .* at most"),
        ({"alpha_pattern": {"(([a-z_.0-9])+)+!": 2}}, "repeats too much"),
        ({"rank_pattern": {".*.*.*.*x": 4}}, "repeats too much"),
    ],
)
def test_settings_that_are_refused(model, folder, changes, words):
    settings(folder, **changes)
    with pytest.raises(BadAdapter, match=words):
        read_adapter("x", folder, model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.clear(), "has no LoRA matrices"),
        (lambda t: t.pop(first(t, "B")), "has lora_A alone"),
        (lambda t: t.update({first(t): t[first(t)][:2].contiguous()}), "lora_A has rank 2, lora_B 4"),
        (lambda t: t.update({first(t): t[first(t)][:, :8].contiguous()}), "for another base"),
        (lambda t: t.update({first(t): t[first(t)].flatten()}), "not that of a matrix"),
        (lambda t: t.update({first(t): t[first(t)].to(torch.int8)}), "is I8"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 8)}),
            "embeddings",
        ),
        (lambda t: t.update({"base_model.model.x.lora_magnitude_vector": torch.ones(4)}), "DoRA"),
        (lambda t: t.update({first(t, "B").replace("weight", "bias"): torch.ones(4)}), "biases"),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.layers.9.mlp.lora_A.weight": torch.ones(4, 8),
                    "base_model.model.model.layers.9.mlp.lora_B.weight": torch.ones(8, 4),
                }
            ),
            "no module model.layers.9.mlp",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.norm.lora_A.weight": torch.ones(4, 8),
                    "base_model.model.model.norm.lora_B.weight": torch.ones(8, 4),
                }
            ),
            "model.norm is a LlamaRMSNorm",
        ),
    ],
)
def test_tensors_that_are_refused(model, folder, change, words):
    tensors(folder, change)
    with pytest.raises(BadAdapter, match=words):
        read_adapter("x", folder, model)


def test_files_that_are_refused(model, folder, tmp_path):
    with pytest.raises(BadAdapter, match="is no folder"):
        read_adapter("x", tmp_path / "nowhere", model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadAdapter, match="has no adapter_config.json"):
        read_adapter("x", tmp_path / "empty", model)
    with pytest.raises(BadAdapter, match="rank 4; at most 2"):
        read_adapter("x", folder, model, max_rank=2)
    data = (folder / WEIGHTS).read_bytes()
    for cut in (b"", data[:4], data[:100], data[:-10]):
        (folder / WEIGHTS).write_bytes(cut)
        with pytest.raises(BadAdapter, match="cannot be read"):
            read_adapter("x", folder, model)
    (folder / WEIGHTS).unlink()
    with pytest.raises(BadAdapter, match=f"has no {WEIGHTS}"):
        read_adapter("x", folder, model)
    for text in ("[1]", "{", "[" * 100000):
        (folder / CONFIG).write_text(text)
        with pytest.raises(BadAdapter, match=CONFIG):
            read_adapter("x", folder, model)


def header(folder, change):
    """Rewrite the header of the weights as it is given, the data behind it as it was."""
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def changed(**entry):
    return lambda found: found | {first(found): found[first(found)] | entry}


@pytest.mark.parametrize(
    "change",
    [
        lambda found: b"[]",
        lambda found: b"[" * 100000,
        lambda found: b"\xff{}",
        lambda found: found | {first(found): 1},
        changed(shape=[2**62, 4]),
        changed(shape=[-4, -64]),
        changed(shape=[4.0, 64]),
        changed(data_offsets=[0, 10**30]),
        changed(data_offsets=[-8, 1016]),
        changed(data_offsets=[1]),
        changed(dtype=[]),
    ],
)
def test_headers_that_are_broken(model, folder, change):
    header(folder, change)
    with pytest.raises(BadAdapter, match="adapter 'x': "):
        read_adapter("x", folder, model)


def test_a_header_of_absurd_length(model, folder):
    for length in (2**63, HEADER_BYTES + 1):
        (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + b" " * (HEADER_BYTES + 1))
        with pytest.raises(BadAdapter, match="header"):
            read_adapter("x", folder, model)


def test_a_base_weight_without_a_shape(model, folder):
    tensors(folder, lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.tensor(1.0)}))
    with pytest.raises(BadAdapter, match="resized"):
        read_adapter("x", folder, model)


def test_a_tensor_named_twice(model, folder):
    tensors(folder, lambda t: t.update({first(t).removeprefix("base_model.model."): t[first(t)].clone()}))
    with pytest.raises(BadAdapter, match="twice"):
        read_adapter("x", folder, model)


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000, None, 3])
def test_paths_that_are_none(model, path):
    with pytest.raises(BadAdapter, match="adapter 'x'"):
        read_adapter("x", path, model)


def test_what_is_no_regular_file(model, folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)  # reading it would wait for ever
    with pytest.raises(BadAdapter, match=f"has no {WEIGHTS}"):
        read_adapter("x", folder, model)


def test_a_link_to_a_folder_is_the_folder(model, folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    found = read_adapter("x", tmp_path / "link", model)
    assert found.parts == read_adapter("x", folder, model).parts


def test_other_weights_of_the_same_sizes_are_another_adapter(model, folder):
    """Trained on and saved into the same folder: the cached pages are of the weights before."""
    found = read_adapter("x", folder, model)
    tensors(folder, lambda t: t.update({first(t): t[first(t)] + 1}))
    with pytest.raises(BadAdapter, match="has changed since it was loaded"):
        list(found.tensors())


def test_a_file_that_changes_later(model, folder):
    found = read_adapter("x", folder, model)
    assert len(list(found.tensors())) == len(found.parts)
    tensors(folder, lambda t: t.update({first(t): t[first(t)][:2].contiguous()}))
    with pytest.raises(BadAdapter, match="has changed"):
        list(found.tensors())
    (folder / WEIGHTS).unlink()
    with pytest.raises(BadAdapter, match="adapter 'x'.*cannot be read"):
        list(found.tensors())


def test_the_bases_own_head_beside_an_adapter(tmp_path):
    model = tiny("llama")
    adapter(model, tmp_path / "x", targets=["lm_head", *MLP])
    assert "lm_head" in read_adapter("x", tmp_path / "x", model).parts
    tensors(tmp_path / "x", lambda t: t.update({next(k for k in t if "base_layer" in k): torch.ones(3, 8)}))
    with pytest.raises(BadAdapter, match="the vocabulary was resized"):
        read_adapter("x", tmp_path / "x", model)
