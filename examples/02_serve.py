"""Many requests at once on one quantized model, each with the LoRA adapter it names.

python examples/02_serve.py [MODEL] [RECIPE] [FOLDER]     MODEL: a folder, a hub id or demo (the default)
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfaccel

name, recipe, folder = (sys.argv[1:] + ["demo", "int8", ""][len(sys.argv) - 1 :])[:3]
folder = Path(folder or tempfile.mkdtemp(prefix="hfaccel-example-"))

if name == "demo":
    model, tokenizer = hfaccel.demo_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)

# Two adapters as PEFT saves them; these are random, yours are trained.
for seed in range(2):
    torch.manual_seed(seed)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(copy.deepcopy(model), config).save_pretrained(folder / f"adapter-{seed}")

hfaccel.patch(model, recipe)
prompt = "The three laws of motion are"
inputs = tokenizer(prompt, return_tensors="pt")
alone = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False)
alone = alone[0, inputs["input_ids"].shape[1] :].tolist()

with hfaccel.Server(model, tokenizer, adapters={"zero": folder / "adapter-0"}) as server:
    server.load_adapter("one", folder / "adapter-1")  # also while requests run
    asked = {"max_new_tokens": 12, "ignore_eos": True}
    who = [None, "zero", "one"]
    answers = server.generate([prompt] * 3, options=[{"adapter": adapter} for adapter in who], **asked)
    for adapter, answer in zip(who, answers, strict=True):
        print(f"{adapter or 'the model itself'}: {answer.text!r}")
    again = server.generate(prompt, adapter="one", **asked)
    seeded = [server.generate(prompt, temperature=0.8, seed=7, **asked).ids for _ in range(2)]

print("without an adapter, as model.generate:", answers[0].ids == alone)
print("alone as beside others:", again.ids == answers[2].ids)
print("a seed repeats itself:", seeded[0] == seeded[1])
