"""transformers as it comes: `variant` is the dtype (bf16 or fp32)."""

import time


class First:
    def __init__(self):
        self.calls, self.at = 0, None

    def put(self, value):
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self):
        pass


def loaded(spec):
    import torch
    import transformers

    torch.set_num_threads(spec["threads"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[spec["variant"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=dtype).eval()
    return model, {"version": transformers.__version__}


def load(spec, loaded=loaded):
    model, info = loaded(spec)
    return runner(model), info


def scorer(spec, loaded=loaded):
    model, info = loaded(spec)
    return rows_of(model), info


def rows_of(model):
    """Ids of one window -> logits [T, V], numpy fp32."""
    import torch

    def score(ids):
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()

    return score


def runner(model):
    import torch

    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0

    def generate(ids, tokens, **extra):
        options = {"do_sample": False, "max_new_tokens": tokens}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options, **extra)

    def run(prompt, new_tokens):
        ids = torch.tensor(prompt)
        streamer = First() if len(prompt) == 1 else None
        start = time.perf_counter()
        if streamer is None:
            generate(ids, 1)
            first = time.perf_counter() - start
            start = time.perf_counter()
            generate(ids, new_tokens)
        else:
            generate(ids, new_tokens, streamer=streamer)
            first = streamer.at - start
        return first, time.perf_counter() - start

    return run
