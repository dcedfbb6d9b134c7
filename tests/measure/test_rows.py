"""measure/rows.py and what it prints: a row is what was measured, and a process that fails says why."""

import pytest
import torch

import hfaccel
from exported import small
from gguf_models import of_blocks
from hfaccel.errors import PatchError
from hfaccel.formats.export import export
from hfaccel.measure import rows
from hfaccel.measure.chart import bars
from hfaccel.measure.corpus import text
from hfaccel.measure.perplexity import perplexity
from hfaccel.measure.speed import summarize
from hfaccel.quant.linear import is_packed
from test_readme import _tokenizer
from tiny import tiny


@pytest.fixture
def folder(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    _tokenizer(model.config.vocab_size).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def spec(folder, recipe, **fields):
    short = {"prompt_tokens": 8, "new_tokens": 4, "repeats": 1, "windows": 0, "text": "The three laws"}
    return rows.Spec(folder, recipe, **{**short, **fields})


def test_rows_of_the_original_and_of_a_patch(folder):
    plain, int4 = (rows.measure(spec(folder, recipe)) for recipe in ("fp32", "int4"))
    original = sum(p.nbytes for p in tiny("llama").parameters())
    assert original <= plain["weight_bytes"] < original + 1024 and plain["runs"] == {}
    assert int4["weight_bytes"] < 0.5 * plain["weight_bytes"] and "generate" in int4["runs"]
    for row in (plain, int4):
        assert row["ttft_s"] > 0 and row["decode_tokens_s"] > 0 and len(row["samples"]) == 1
        assert row["peak_rss_bytes"] >= row["rss_bytes"] > row["weight_bytes"]
        assert row["text"].startswith("The three laws")


def test_quality_is_against_the_original(folder):
    row = rows.measure(spec(folder, "int8", windows=1))
    assert row["windows"] == 1 and 0 < row["kl"] < 0.1 and 0.5 < row["top1_agreement"] <= 1
    alone = perplexity(*rows.load(folder), text("wikitext2_test"), windows=1).perplexity
    assert row["reference_perplexity"] == pytest.approx(alone, rel=1e-6) != row["perplexity"]


def test_a_process_that_fails_says_why(folder):
    with pytest.raises(PatchError, match="measuring 'int9'.*unknown|int9"):
        rows.measure_apart(spec(folder, "int9"))


def test_rates_count_the_tokens_after_the_first():
    found = summarize(torch.zeros(2, 16, dtype=torch.long), 5, [(1.0, 3.0), (2.0, 3.0), (1.5, 5.5)])
    assert (found.prompt_tokens, found.new_tokens, found.batch) == (16, 5, 2)
    assert found.ttft_s == 1.5 and found.decode_tokens_s == 4.0  # 8 tokens in 2, 1 and 4 seconds


def test_a_chart_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    table = [{"recipe": "fp32", "speed": 2.0, "size": None}, {"recipe": "int8", "speed": 4.5}]
    path = bars(table, {"speed": "tokens/s", "size": "MB"}, "title", tmp_path / "new" / "chart.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("recipe", ["kv8", "lora4+kv8"])
@pytest.mark.parametrize("kind", ["gguf", "gptq"])
def test_a_recipe_that_changes_no_weights_leaves_them_packed(kind, recipe, tmp_path):
    path = str(tmp_path / "out")
    if kind == "gguf":
        path = str(of_blocks("Q4_1", tmp_path / "m.gguf"))
    else:
        export(small("int4-g32"), None, "gptq", path)
    as_it_is, model = rows.load_model(path, packed=True), rows.load_model(path, recipe=recipe)
    assert hfaccel.patch(model, recipe) is model and model._hfaccel.config.to_recipe() == recipe
    name = "model.layers.0.mlp.up_proj"
    assert torch.equal(model.get_submodule(name).weight, as_it_is.get_submodule(name).weight)
    assert is_packed(model.get_submodule(name))


def test_a_gguf_file_is_packed_or_dequantized_as_asked(tmp_path):
    path = str(of_blocks("Q4_1", tmp_path / "m.gguf"))
    packed = rows.load_model(path, packed=True)
    assert packed._hfaccel.config.to_recipe() == "runtime"
    dense = rows.load_model(path, dtype=torch.float32)
    assert not hasattr(dense, "_hfaccel") and type(dense.lm_head) is torch.nn.Linear
    assert torch.equal(packed.lm_head.dequantize(), dense.lm_head.weight)
    hfaccel.patch(dense, "int8", keep_original=False)
