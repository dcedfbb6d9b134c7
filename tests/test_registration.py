"""Folders of ours are read in either import order, and importing hfaccel imports nothing else."""

import subprocess
import sys

import torch

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
