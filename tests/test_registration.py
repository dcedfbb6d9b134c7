"""Folders of ours are read in either import order, and importing hfaccel imports nothing else."""

import importlib.util
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from hfaccel.registration import after_import
from saved import attention, logits, patched
from tiny import ids, tiny

SCRIPT = """
import sys
order, folder, result = sys.argv[1:]
if order == "first":
    import hfaccel
    assert not {"torch", "transformers", "numpy"} & set(sys.modules)
else:
    from transformers import LlamaForCausalLM
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    assert "hfaccel" not in AUTO_QUANTIZER_MAPPING
    alone = None
    try:
        alone = LlamaForCausalLM.from_pretrained(folder)
    except Exception as error:
        print("alone:", type(error).__name__)
    assert alone is None
    import hfaccel
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
assert model._hfaccel.origin == "loaded"
torch.save(model(input_ids=torch.load(result)).logits, result)
"""


def test_after_import_acts_once_when_the_module_has_been_imported(tmp_path, monkeypatch):
    (tmp_path / "arriving.py").write_text("value = 1 if ready else 0")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = list(sys.meta_path), []
    after_import("arriving", lambda module: seen.append(module.value))
    assert importlib.util.find_spec("arriving") is not None  # a look at the module is no import of it
    with pytest.raises(NameError):
        import_module("arriving")
    assert seen == []
    (tmp_path / "arriving.py").write_text("value = 'whole'")
    importlib.invalidate_caches()
    module = import_module("arriving")
    assert seen == ["whole"] and sys.meta_path == finders
    assert module.__spec__.loader is module.__loader__ and module.__file__.endswith("arriving.py")
    after_import("arriving", lambda module: seen.append("again"))
    assert seen == ["whole", "again"] and sys.meta_path == finders
    del sys.modules["arriving"]


def test_either_import_order_in_a_fresh_process(tmp_path):
    model = patched(tiny("TL"), "int4")
    assert attention(model) == {"attn_implementation": "eager"}
    model.save_pretrained(tmp_path / "out")
    for order in ("first", "last"):
        result = tmp_path / f"{order}.pt"
        torch.save(ids(2, 12), result)
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, order, tmp_path / "out", result], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert torch.equal(torch.load(result), logits(model))
