"""A process of another environment: logits of a folder through its transformers, as JSON."""

import json
import sys

import torch
import transformers

spec = json.loads(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(
    spec["folder"], dtype=torch.float32, attn_implementation="eager"
)
with torch.no_grad():
    logits = model.eval()(torch.tensor(spec["ids"])).logits.float()
with open(spec["output"], "w") as file:
    json.dump(logits.tolist(), file)
