"""compressed-tensors folders through transformers and the compressed-tensors package.

HFACCEL_PEER_VLLM names the python of an environment that has both, as vLLM's has.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from exported import small
from hfaccel.formats.export import export
from tiny import ids

PEER = os.environ.get("HFACCEL_PEER_VLLM")
pytestmark = pytest.mark.skipif(not PEER, reason="HFACCEL_PEER_VLLM names no python")


@pytest.mark.parametrize("recipe", ["int4-g32", "gptq4-sym-g64", "int8", "int8-asym"])
def test_logits_are_those_of_the_dequantized_model(tmp_path, recipe):
    """fp16 scales are widened there in a model of fp32, so nothing is rounded on the way."""
    model = small(f"{recipe}+head16")
    export(model, None, "compressed-tensors", tmp_path / "packed")
    export(model, None, "dense:fp32", tmp_path / "dense")
    plain = type(model).from_pretrained(tmp_path / "dense", attn_implementation="eager")
    x = ids(1, 12)
    spec = {"folder": str(tmp_path / "packed"), "ids": x.tolist(), "output": str(tmp_path / "logits.json")}
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = Path(__file__).with_name("transformers_logits.py")
    done = subprocess.run([PEER, str(script), json.dumps(spec)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.tensor(json.loads((tmp_path / "logits.json").read_text()))
    with torch.no_grad():
        assert (found - plain(x).logits).abs().max() < 1e-4
