"""Use an installed hfaccel from outside its source tree: import, patch, generate, save, reload, CLI.

Run by scripts/smoke.sh in an environment that holds the wheel and nothing else of this project.
"""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hfaccel
import hfaccel_kernels

ROOT = Path(__file__).resolve().parents[1]
for package in (hfaccel, hfaccel_kernels):
    location = Path(package.__file__).resolve()
    if ROOT in location.parents:
        sys.exit(f"{package.__name__} comes from the source tree ({location}), not from the installed wheel")

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(2, 256, (1, 12))


def tokens(model):
    ids = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
    )
    return ids[0].tolist()


before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
if hfaccel.patch(model, "int4", progress=False) is not model:
    sys.exit("patch did not return the same object")
patched = tokens(model)
model.save_pretrained("saved")
for load in (AutoModelForCausalLM.from_pretrained, hfaccel.from_pretrained):
    if tokens(load("saved").eval()) != patched:
        sys.exit(f"{load.__qualname__}: the reloaded model generates other tokens")
hfaccel.unpatch(model)
changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
if changed:
    sys.exit(f"unpatch did not restore {changed}")

for command in (["hfaccel", "recipes"], ["hfaccel", "doctor"], ["hfaccel", "--help"]):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
print(f"smoke test passed: hfaccel from {Path(hfaccel.__file__).parent}, {len(patched)} tokens")
