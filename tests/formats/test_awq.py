"""AWQ folders written: read by the format's description, and by hfaccel."""

import pytest
import torch

import hfaccel
from exported import matrices, nibbles, same_packed, small
from hfaccel.errors import PatchError, UnknownName
from hfaccel.formats.export import export
from saved import config_json, patched, stored
from tiny import tiny

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of output 0, 1, ... among a word's nibbles, lowest first


def by_description(tensors, name: str, group: int) -> torch.Tensor:
    """The weight [N, K] of a linear, word by word."""

    def rows(packed):
        return torch.tensor(
            [sum(([nibbles(word)[p] for p in PLACES] for word in row.tolist()), []) for row in packed]
        ).float()

    codes, zeros = rows(tensors[f"{name}.qweight"]), rows(tensors[f"{name}.qzeros"])
    index = torch.arange(len(codes)) // group
    return ((codes - zeros[index]) * tensors[f"{name}.scales"].float()[index]).t()


@pytest.mark.parametrize("recipe", ["int4-g32", "gptq4-sym-g16", "awq4-g64"])
def test_files_hold_what_the_model_holds(tmp_path, recipe):
    model = small(recipe)
    export(model, None, "awq", tmp_path / "out")
    tensors, record = stored(tmp_path / "out"), config_json(tmp_path / "out")["quantization_config"]
    assert record == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": int(recipe.rpartition("g")[2]),
        "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }
    for name, weight in matrices(model).items():
        assert torch.equal(by_description(tensors, name, record["group_size"]), weight)


@pytest.mark.parametrize("recipe", ["int4-g32", "gptq4-sym-g16", "awq4-g64", "int4-row"])
def test_round_trip(tmp_path, recipe):
    model = small(recipe)
    export(model, None, "awq", tmp_path / "out")
    same_packed(model, hfaccel.from_pretrained(tmp_path / "out"))


@pytest.mark.parametrize(
    ("family", "recipe", "words"),
    [
        ("llama", "int8", "q_proj: .*int8 row symmetric; an awq folder holds integers of 4 bits"),
        ("llama", "int4-g64", "mlp.down_proj is 64x112: awq files pack 8 rows a word, in whole groups of 64"),
        ("mixtral", "int4-g16", "model.layers.0.mlp.experts: quantized fused experts are not written as awq"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path, family, recipe, words):
    with pytest.raises(PatchError, match=words):
        export(patched(tiny(family), recipe), None, "awq", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_it_has_no_variants(tmp_path):
    with pytest.raises(UnknownName, match="awq:gemv: awq has no variants"):
        export(small("int4-g32"), None, "awq:gemv", tmp_path / "out")
