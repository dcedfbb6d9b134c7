"""vLLM on the CPU: `variant` is the dtype; prefix caching off, or a repeated prompt would cost nothing."""

import os
import time

import traffic


def loaded(spec, tokens, **settings):
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{spec['threads'] - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    import vllm

    dtype = {"bf16": "bfloat16", "fp32": "float32"}[spec["variant"]]
    return vllm.LLM(spec["folder"], dtype=dtype, max_model_len=tokens + 8, **settings)


def load(spec):
    model = loaded(spec, spec["prompt_tokens"] + spec["new_tokens"], enable_prefix_caching=False)
    import vllm

    def timed(prompt, tokens):
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        model.generate([{"prompt_token_ids": row} for row in prompt], sampling, use_tqdm=False)
        return time.perf_counter() - start

    def run(prompt, new_tokens):
        return timed(prompt, 1), timed(prompt, new_tokens)

    return run, {"version": vllm.__version__}


def server(spec):
    model = loaded(spec, spec["most_tokens"], enable_prefix_caching=spec["shared"] > 0)
    import vllm

    engine = model.llm_engine
    had = {}

    def add(number, job):
        tokens = job["new_tokens"]
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        had[number] = 0
        engine.add_request(str(number), {"prompt_token_ids": job["prompt"]}, sampling)

    def step():
        for output in engine.step():
            number, tokens = int(output.request_id), len(output.outputs[0].token_ids)
            yield number, tokens - had[number], output.finished
            had[number] = tokens

    return traffic.Stepper(add, step), {"version": vllm.__version__}
