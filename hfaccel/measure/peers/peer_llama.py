"""llama.cpp through llama-cpp-python, batch 1: `variant` names the GGUF type of `artifact`."""

import os
import time


def load(spec):
    import llama_cpp

    model = llama_cpp.Llama(
        spec["artifact"],
        n_ctx=spec["prompt_tokens"] + spec["new_tokens"] + 8,
        n_batch=512,
        n_threads=spec["threads"],
        n_threads_batch=spec["threads"],
        verbose=False,
    )

    def run(prompt, new_tokens):
        if len(prompt) != 1:
            raise ValueError("llama-cpp-python generates one row at a time")
        model.reset()
        start = time.perf_counter()
        tokens = model.generate(prompt[0], top_k=1, temp=0.0, repeat_penalty=1.0)
        next(tokens)
        first = time.perf_counter() - start
        for _ in range(new_tokens - 1):
            next(tokens)
        return first, time.perf_counter() - start

    return run, {"version": llama_cpp.__version__, "file_bytes": os.path.getsize(spec["artifact"])}


def scorer(spec):
    import llama_cpp

    model = llama_cpp.Llama(
        spec["artifact"],
        n_ctx=1024,
        n_batch=512,
        n_threads=spec["threads"],
        n_threads_batch=spec["threads"],
        logits_all=True,
        verbose=False,
    )

    def score(ids):
        model.reset()
        model.eval(ids)
        return model.scores[: len(ids)].copy()

    return score, {"version": llama_cpp.__version__, "model_bytes": os.path.getsize(spec["artifact"])}
