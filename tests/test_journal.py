"""Originals: where they come from, what happens to them, and when they cannot be had."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import hfaccel
from hfaccel import PatchError
from hfaccel.quant.linear import QuantLinear
from snapshot import Snapshot, logits
from tiny import tiny

pytestmark = pytest.mark.usefixtures("spill")


def test_originals_come_from_the_checkpoint(saved, spill):
    model = LlamaForCausalLM.from_pretrained(saved)
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    assert not spill.exists()
    hfaccel.unpatch(model)
    before.check()


def test_sharded_checkpoints_and_base_models(tmp_path, spill):
    from transformers import LlamaModel

    folder = tmp_path / "sharded"
    tiny("TL", num_hidden_layers=2).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    for cls in (LlamaForCausalLM, LlamaModel):
        model = cls.from_pretrained(folder)
        before = model.state_dict()
        before = {key: value.clone() for key, value in before.items()}
        hfaccel.patch(model, "int8")
        assert not spill.exists()
        hfaccel.unpatch(model)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tensors_that_differ_from_the_checkpoint_are_spilled(saved, spill):
    model = LlamaForCausalLM.from_pretrained(saved)
    model.lm_head.weight.data[0, 0] += 1
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    assert len(list(spill.glob("*/*.safetensors"))) == 1
    hfaccel.unpatch(model)
    before.check()
    assert not list(spill.glob("*"))


def test_another_dtype_than_the_checkpoint_is_spilled(saved, spill):
    model = LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    assert len(list(spill.glob("*/*.safetensors"))) == 15
    hfaccel.unpatch(model)
    before.check()


def test_a_checkpoint_that_changed_is_noticed(saved):
    model = LlamaForCausalLM.from_pretrained(saved)
    hfaccel.patch(model, "int8")
    wanted = logits(model)
    file = saved / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 1
    file.unlink()
    file.write_bytes(raw)
    with pytest.raises(PatchError, match="is no longer the tensor that was patched"):
        hfaccel.unpatch(model)
    with pytest.raises(PatchError, match="is no longer the tensor that was patched"):
        hfaccel.original(model).__enter__()
    file.unlink()
    with pytest.raises(PatchError, match="cannot be read from"):
        hfaccel.unpatch(model)
    assert torch.equal(logits(model), wanted)  # still patched, and whole
    raw[-1000] ^= 1
    file.write_bytes(raw)
    hfaccel.unpatch(model)


def test_saving_over_the_checkpoint_keeps_the_originals(saved):
    model = LlamaForCausalLM.from_pretrained(saved)
    before = Snapshot(model)
    hfaccel.patch(model, "int8")
    model.save_pretrained(saved)
    hfaccel.unpatch(model)
    before.check()


def test_spilled_originals_go_with_the_model(spill):
    model = tiny("TL")
    hfaccel.patch(model, "int8")
    assert len(list(spill.glob("*/*.safetensors"))) == 29
    assert oct(next(spill.glob("*")).stat().st_mode)[-3:] == "700"
    del model
    assert not list(spill.glob("*"))


SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from tiny import tiny
import hfaccel
model = hfaccel.patch(tiny("TL"), "int8")
if os.fork() == 0:
    del model
    sys.exit()
os.wait()
hfaccel.unpatch(hfaccel.patch(hfaccel.unpatch(model), "int4"))
model = hfaccel.patch(tiny("TL"), "int8")
assert len(os.listdir({spill!r})) == 1
"""


def test_spilled_originals_outlive_a_child_and_go_at_exit(spill):
    script = SCRIPT.format(tests=str(Path(__file__).parent), spill=str(spill))
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)
    assert spill.is_dir() and not list(spill.glob("*"))


def test_a_full_disk_is_seen_before_anything_changes(monkeypatch, spill):
    model = tiny("TL")
    before = Snapshot(model)
    full = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("hfaccel.journal.shutil.disk_usage", lambda _: full)
    with pytest.raises(
        PatchError, match="needs [0-9,]+ bytes under .*, 1,000 are free: set HFACCEL_SPILL_DIR"
    ):
        hfaccel.patch(model, "int8")
    assert not spill.exists()
    before.check()
    hfaccel.patch(model, "int8", keep_original=False)


def test_a_disk_that_fills_up_in_the_middle(monkeypatch, spill):
    from hfaccel import journal

    model, real, calls = tiny("TL"), journal.save_file, []
    before = Snapshot(model)

    def failing(*args):
        calls.append(args)
        if len(calls) == 7:
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(journal, "save_file", failing)
    with pytest.raises(PatchError, match="layers.0.mlp.down_proj.weight: .*No space left.*HFACCEL_SPILL_DIR"):
        hfaccel.patch(model, "int8")
    before.check()
    assert not list(spill.glob("*"))


def test_a_spill_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(tmp_path / "file"))
    model = tiny("TL")
    before = Snapshot(model)
    with pytest.raises(PatchError, match="HFACCEL_SPILL_DIR=.*: cannot be written"):
        hfaccel.patch(model, "int8")
    before.check()


def test_originals_that_are_not_kept(spill):
    model = tiny("TL")
    hfaccel.patch(model, "int8", keep_original=False)
    assert not spill.exists() and not model._hfaccel.journal.saved
    for call in (hfaccel.unpatch, lambda m: hfaccel.original(m).__enter__()):
        with pytest.raises(PatchError, match="were not kept"):
            call(model)
    assert isinstance(model.lm_head, QuantLinear)
    runtime = tiny("TL")
    before = Snapshot(runtime)
    hfaccel.unpatch(hfaccel.patch(runtime, "runtime", keep_original=False))
    before.check()


def test_later_changes_survive_unpatch():
    model = tiny("TL")
    hfaccel.patch(model, "int8")
    model.model.norm.weight.data.mul_(2)
    model.train()
    seen = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    norm = model.model.norm.weight.clone()
    hfaccel.unpatch(model)
    assert torch.equal(model.model.norm.weight, norm)
    assert all(module.training for module in model.modules())
    logits(model)
    assert seen == [1]


def test_originals_follow_a_move():
    """The originals return to where their replacements are, in their own dtype."""
    model = tiny("TL")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    hfaccel.patch(model, "int8")
    model.to(torch.bfloat16).cpu()
    assert model.model.norm.weight.dtype == torch.bfloat16 and logits(model).dtype == torch.bfloat16
    assert model.lm_head.weight_scale.dtype == torch.float32
    hfaccel.unpatch(model)
    assert model.lm_head.weight.dtype == torch.float32 and torch.equal(
        model.lm_head.weight, state["lm_head.weight"]
    )
