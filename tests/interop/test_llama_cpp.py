"""GGUF files of ours in llama.cpp: they load, and say what the model says.

HFACCEL_PEER_LLAMA_CPP names the python of an environment that has llama-cpp-python; `make interop` makes one.
"""

import json
import os
import subprocess
from pathlib import Path

import gguf
import pytest
import torch

import hfaccel
from hfaccel.formats import gguf_out
from hfaccel.formats.importance import input_squares
from hfaccel.measure.gguf_quality import decode_into, importance_file, their_file
from tiny import ids, tiny
from vocabularies import byte_level, sentence_piece

PEER = os.environ.get("HFACCEL_PEER_LLAMA_CPP")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PEER, reason="HFACCEL_PEER_LLAMA_CPP names no python"),
]
TEXTS = ["then hello 2026", "  the café\n\n über\t12", "<s>hello</s>", "😀 '\"\\ x=1"]


def run(specs):
    """What llama.cpp makes of files: logits [T, V], tokens of TEXTS, greedy tokens, template."""
    filled = [{"prompt": [], "tokens": 0, "texts": TEXTS, **spec} for spec in specs]
    for spec in filled:
        spec["file"], spec["to"] = str(spec["file"]), f"{spec['file']}.f32"
    script = Path(__file__).with_name("llama_cpp_run.py")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([PEER, str(script), json.dumps(filled)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    out = [json.loads(line) for line in done.stdout.strip().splitlines()]
    for spec, each in zip(filled, out, strict=True):
        size = Path(spec["to"]).stat().st_size // 4
        each["logits"] = torch.from_file(spec["to"], size=size).view(len(spec["ids"]), -1)
    return out


# Tiny models of every architecture -------------------------------------------------------------------------

GEMMA = {"query_pre_attn_scalar": 32}
SIX = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILIES = {
    "llama": {"num_attention_heads": 8, "head_dim": 16, "num_key_value_heads": 2},
    "mistral": {"sliding_window": None},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": GEMMA,
    "gemma3": GEMMA | SIX,
    "phi3": {},
    "gpt2": {},
    "falcon": {},
    "falcon_mq": {"bias": False},
    "starcoder2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_architecture(family, tmp_path):
    model = tiny(family, vocab_size=300, **FAMILIES[family])
    tokenizer = byte_level()
    gguf_out.write(model, tokenizer, "F32", tmp_path / "m.gguf")
    prompt = ids(1, 40)[0]
    (found,) = run([{"file": tmp_path / "m.gguf", "ids": prompt.tolist()}])
    with torch.no_grad():
        wanted = model(prompt[None]).logits[0]
    # fp32 in another order, and llama.cpp's tables of gelu and silu are fp16
    assert (found["logits"] - wanted).norm() < 2e-3 * wanted.norm()
    assert torch.equal(found["logits"].argmax(-1), wanted.argmax(-1))


def test_rope_of_llama_3(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny("llama", rope_parameters=rope)
    gguf_out.write(model, None, "F32", tmp_path / "m.gguf")
    prompt = ids(1, 40)[0]
    (found,) = run([{"file": tmp_path / "m.gguf", "ids": prompt.tolist(), "texts": []}])
    with torch.no_grad():
        wanted = model(prompt[None]).logits[0]
    assert (found["logits"] - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_tokens_are_the_tokenizer_s(make, tmp_path):
    model, tokenizer = tiny("llama", vocab_size=340), make()
    gguf_out.write(model, tokenizer, "F32", tmp_path / "m.gguf")
    (found,) = run([{"file": tmp_path / "m.gguf", "ids": [5, 6]}])
    assert found["tokens"] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert found["template"] == tokenizer.chat_template


MIXED = {
    "llama": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9},
    "mixtral": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 9,
        "num_local_experts": 8,
    },
    "phi3": {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 9},
    "falcon": {"hidden_size": 256, "ffn_hidden_size": 512, "num_hidden_layers": 17},
    "gpt2": {"hidden_size": 288, "n_inner": 512, "num_hidden_layers": 9},
}


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("variant", ["Q4_K_M", "Q5_K_M", "Q6_K", "Q4_0", "Q4_1", "Q8_0"])
def test_types_are_those_that_llama_cpp_would_choose(family, variant, tmp_path):
    model = tiny(family, vocab_size=300, **MIXED[family])
    source, ours, theirs = (tmp_path / f"{name}.gguf" for name in ("source", "ours", "theirs"))
    gguf_out.write(model, byte_level(), "F16", source)
    spec = {"source": str(source), "target": str(theirs), "kind": variant, "threads": 1}
    importance = None
    if variant == "Q4_0":
        importance = input_squares(model, ids(2, 40), None, "a test")
        index = importance_file(importance, model, tmp_path / "numbers")
        spec |= {"weights": str(tmp_path / "numbers"), "index": index}
    gguf_out.write(model, byte_level(), variant, ours, importance=importance)
    their_file(PEER, spec)
    kinds = [{t.name: t.tensor_type.name for t in gguf.GGUFReader(file).tensors} for file in (ours, theirs)]
    assert kinds[0] == kinds[1]


# The demo model --------------------------------------------------------------------------------------------

# Mean KL of llama.cpp's distribution from that of the file's own values in fp32. Its products round
# activations to 8 bits in blocks of 32 or 256 where weights are of block types.
MOST_KL = {
    "F16": 1e-5,
    "BF16": 1e-3,
    "Q8_0": 0.01,
    "Q4_0": 0.01,
    "Q4_1": 0.01,
    "Q5_K_M": 0.01,
    "Q4_K_M": 0.01,
}
NEAR = 0.3  # of two tokens with logits this close either may come first


@pytest.mark.real
@pytest.mark.parametrize("variant", MOST_KL)
def test_the_demo_model_says_the_same(variant, tmp_path):
    model, tokenizer = hfaccel.demo_model(off_grid=True)
    file = tmp_path / "m.gguf"
    gguf_out.write(model, tokenizer, variant, file)
    decode_into(model, file)
    text = "The tower is 324 metres tall, about the same height as an 81-storey building. " * 4
    prompt, start = tokenizer(text)["input_ids"], tokenizer("Gravity is")["input_ids"]
    spec = {"file": file, "ids": prompt, "prompt": start, "tokens": 24}
    (found,) = run([spec])
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        ours = model.generate(torch.tensor([start]), max_new_tokens=24, do_sample=False)[0, len(start) :]
    kl = (wanted.exp() * (wanted - found["logits"].log_softmax(-1))).sum(-1).mean()
    assert kl < MOST_KL[variant]
    assert found["tokens"] == [tokenizer(text)["input_ids"] for text in TEXTS]
    ours, theirs = ours.tolist(), found["greedy"]
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is not None:
        with torch.no_grad():
            logits = model(torch.tensor([start + ours[:at]])).logits[0, -1]
        assert variant not in ("F16", "BF16") and logits.max() - logits[theirs[at]] < NEAR, (at, ours, theirs)
