"""Exported folders in vLLM: they load, and say what our packed model says.

HFACCEL_PEER_VLLM names the python of an environment that has vLLM; `make interop` makes one.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import hfaccel
from hfaccel.formats.export import export

PEER = os.environ.get("HFACCEL_PEER_VLLM")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),  # vLLM takes a minute or more to start
    pytest.mark.skipif(not PEER, reason="HFACCEL_PEER_VLLM names no python"),
]

PROMPTS = ("Gravity is", "The capital of France is", "Once upon a time, there was")
TOKENS = 24
# vLLM multiplies in 16 bits and rounds activations otherwise than we do: of two tokens with logits this close
# either may come first, and what follows then is another text.
NEAR = 0.1

# format, recipe, dtype in vLLM: that of the scales, so that they stay what they are
CASES = [
    ("gptq", "int4-sym-g64", "float16"),
    ("awq", "int4-g64", "float16"),
    ("compressed-tensors", "int4-g64", "float16"),
    ("compressed-tensors", "w8a8", "float32"),
]
# W8A8 magnifies fp32's own rounding: a code of an activation that flips moves all that follow. Embeddings
# times 1 + 1e-7 of noise move our own logits by 0.7 to 0.9 RMS; vLLM's differ from ours by 0.3 to 0.8. So
# several tokens can be first, and one of them has to be vLLM's.
DRAWS = {"w8a8": 32}


@pytest.mark.parametrize(("format", "recipe", "dtype"), CASES, ids=lambda value: str(value))
def test_vllm_gives_the_same_greedy_text(tmp_path, format, recipe, dtype):
    model, tokenizer = hfaccel.demo_model()
    hfaccel.patch(model, f"{recipe}+head16", tokenizer=tokenizer, keep_original=False)
    export(model, tokenizer, format, tmp_path / "out")
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    found = vllm_ids(tmp_path / "out", dtype, prompts)
    whole = 0
    for prompt, theirs in zip(prompts, found, strict=True):
        assert len(theirs) == TOKENS
        start = torch.tensor([prompt])
        ours = model.generate(start, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        ours = ours[0, len(prompt) :].tolist()
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is None:
            whole += 1
            continue
        gaps = behind(model, prompt + ours[:at], theirs[at], DRAWS.get(recipe, 0))
        assert min(gaps) < NEAR, (at, gaps, ours, theirs)
    assert whole >= 1 or recipe in DRAWS


def behind(model, ids: list[int], token: int, draws: int) -> list[float]:
    """How far behind the first token another one is: as it is, and with an ulp of noise on the embeddings."""
    with torch.no_grad():
        rows = model.get_input_embeddings()(torch.tensor([ids]))
        noise = torch.randn(draws, *rows.shape[1:], generator=torch.Generator().manual_seed(0))
        every = torch.cat([rows, rows * (1 + 1e-7 * noise)])
        logits = model(inputs_embeds=every).logits[:, -1].float()
    return (logits.amax(1) - logits[:, token]).tolist()


def vllm_ids(folder: Path, dtype: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of token ids, by a process of the peer's own python."""
    output = folder.with_name("ids.json")
    spec = {"folder": str(folder), "dtype": dtype, "prompts": prompts, "tokens": TOKENS}
    spec["output"] = str(output)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [PEER, str(Path(__file__).with_name("vllm_ids.py")), json.dumps(spec)],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())
