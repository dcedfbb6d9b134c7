"""The table of what a patch changed."""

import pytest

import hfaccel
from hfaccel import RTN
from hfaccel.quant.linear import is_packed
from snapshot import tied
from tiny import tiny

pytestmark = pytest.mark.usefixtures("spill")


def test_report():
    model = tied()
    before = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    hfaccel.patch(model, "int4")
    report = hfaccel.report(model)
    data = report.to_dict()
    assert data["recipe"] == "int4" and data["bytes_before"] == before
    now = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.numel()}
    assert data["bytes"] == sum(now.values()) < before / 2
    assert len(data["modules"]) == 4 * 7 + 2
    text = str(report)
    for part in (
        "model.layers.*.mlp.up_proj",
        "int4 g64 asymmetric",
        "int8 row symmetric",
        "whole model",
        "generate:",
    ):
        assert part in text
    assert sum(r["bytes_after"] for r in data["modules"]) == sum(
        t.nbytes
        for m in model.modules()
        if is_packed(m) and m is not model.lm_head
        for t in m.packed.values()
    )
    arithmetic = 4 * (64 * (64 + 64 + 16 + 16) + 3 * 64 * 176) * (0.5 + 3 / 64) + 512 * 64 + 512 * 4
    packed = sum(r["bytes_after"] for r in data["modules"])
    assert packed == pytest.approx(arithmetic, rel=0.03)


def test_report_has_a_row_for_every_grid_under_one_name():
    first = "model.layers.0.mlp.up_proj"
    config = [RTN(bits=8, targets=(first,)), RTN(bits=4, ignore=(first,))]
    text = str(hfaccel.report(hfaccel.patch(tiny("TL"), config)))
    rows = [line.split() for line in text.splitlines() if line.startswith("model.layers.*.mlp.up_proj")]
    assert [(row[1:4], row[4]) for row in rows] == [
        (["int8", "row", "symmetric"], "1"),
        (["int4", "g64", "asymmetric"], "3"),
    ]


def test_report_of_a_reloaded_folder_has_the_same_rows(tmp_path):
    model = hfaccel.patch(tied(), "w8a8-nosmooth")
    model.save_pretrained(tmp_path)
    first, again = (
        str(hfaccel.report(m)).split("whole model")[0] for m in (model, hfaccel.from_pretrained(tmp_path))
    )
    assert first == again
    assert "model.layers.*.mlp.up_proj       int8 row with dynamic int8 activations" in first


def test_report_of_a_runtime_patch_and_an_encoder():
    assert hfaccel.report(hfaccel.patch(tiny("TL"), "runtime")).to_dict()["modules"] == []
    text = str(hfaccel.report(hfaccel.patch(tiny("bert"), "int8")))
    assert "BertForMaskedLM has no runtime" in text
    assert "left alone: cls.predictions" in text
    text = str(hfaccel.report(hfaccel.patch(tiny("mixtral"), "int8")))
    assert "left alone: model.layers.*.mlp.gate (2): not a target" in text


def test_report_names_the_pattern_that_ignored():
    config = [
        RTN(bits=4, targets="**.self_attn.**", ignore=("re:.*0.*", "**.k_proj")),
        RTN(bits=8, ignore=("model.layers.1.**", "**.self_attn.**")),
    ]
    skipped = hfaccel.report(hfaccel.patch(tiny("TL"), config)).skipped
    whys = {
        "model.layers.0.self_attn.q_proj": "ignored by 're:.*0.*'",
        "model.layers.0.self_attn.k_proj": "ignored by 're:.*0.*'",
        "model.layers.2.self_attn.k_proj": "ignored by '**.k_proj'",
        "model.layers.1.mlp.up_proj": "ignored by 'model.layers.1.**'",
        "model.embed_tokens": "not a target",
    }
    assert {name: skipped[name] for name in whys} == whys
    assert "model.layers.0.mlp.up_proj" not in skipped and "model.layers.2.self_attn.q_proj" not in skipped
    skipped = hfaccel.report(hfaccel.patch(tiny("mixtral"), RTN(targets="model.layers.1.mlp.**"))).skipped
    assert skipped["model.layers.1.mlp.gate"] == "left alone by default"
    assert skipped["model.layers.0.mlp.gate"] == "not a target"
