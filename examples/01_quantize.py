"""Quantize a model in place, look at what changed, save it, load it, take it back.

python examples/01_quantize.py [MODEL] [RECIPE] [FOLDER]     MODEL: a folder, a hub id or demo (the default)
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfaccel

name, recipe, folder = (sys.argv[1:] + ["demo", "int4", ""][len(sys.argv) - 1 :])[:3]
folder = Path(folder or tempfile.mkdtemp(prefix="hfaccel-example-")) / "quantized"

if name == "demo":
    model, tokenizer = hfaccel.demo_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)

inputs = tokenizer("The three laws of motion are", return_tensors="pt")
with torch.no_grad():
    before = model(**inputs).logits

hfaccel.patch(model, recipe)
print(hfaccel.report(model))
tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))

# What a reloaded model computes is what this one computes, bit for bit.
with torch.no_grad():
    patched = model(**inputs).logits
model.save_pretrained(folder)
with torch.no_grad():
    reloaded = hfaccel.from_pretrained(folder)(**inputs).logits
print("reloaded logits identical:", torch.equal(reloaded, patched))

# The originals are still there: for one comparison, or for good.
with hfaccel.original(model), torch.no_grad():
    print("original inside the block:", torch.equal(model(**inputs).logits, before))
hfaccel.unpatch(model)
with torch.no_grad():
    print("original after unpatch:", torch.equal(model(**inputs).logits, before))
