"""transformers as it comes: `variant` is the dtype (bf16 or fp32). Served, it is its continuous batching."""

import threading
import time

MEMORY_SHARE = 0.3  # of what is free, for its pages: its own choice is 0.9, beside which no other peer fits


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


def server(spec):
    from transformers import ContinuousBatchingConfig

    model, info = loaded(spec)
    model.generation_config.eos_token_id, model.generation_config.do_sample = None, False
    config = ContinuousBatchingConfig(max_memory_percent=MEMORY_SHARE)
    manager = model.init_continuous_batching(continuous_batching_config=config)
    manager.start()
    return Batching(manager), info


class Batching:
    """A target of `traffic` over transformers' manager, whose thread steps; one of ours takes its outputs."""

    def __init__(self, manager):
        self.manager, self.running, self.had, self.count = manager, {}, {}, 0
        threading.Thread(target=self.listen, daemon=True).start()

    def send(self, job, record):
        self.count += 1
        name = str(self.count)
        self.running[name], self.had[name] = record, 0
        options = {"max_new_tokens": job["new_tokens"], "streaming": True, "eos_token_id": -1}
        if self.manager.add_request(job["prompt"], request_id=name, **options) is None:
            self.running.pop(name).over("not accepted")

    def listen(self):
        for output in self.manager:
            name, tokens = output.request_id, len(output.generated_tokens)
            if name not in self.running:
                continue
            if tokens > self.had[name]:
                self.running[name].came(tokens - self.had[name])
                self.had[name] = tokens
            if output.is_finished():
                self.running.pop(name).over(output.error)
        for record in self.running.values():
            record.over("its thread ended")
