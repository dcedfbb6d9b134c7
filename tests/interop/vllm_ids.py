"""A process of vLLM's python: greedy continuations of token ids, as JSON."""

import json
import os
import sys


def main(spec: dict) -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    model = vllm.LLM(
        spec["folder"],
        dtype=spec["dtype"],
        max_model_len=256,
        enable_prefix_caching=False,
        enforce_eager=True,  # compiling takes longer than the test
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=spec["tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in spec["prompts"]]
    out = model.generate(prompts, sampling, use_tqdm=False)
    with open(spec["output"], "w") as file:  # vLLM's log is on both streams
        json.dump([list(each.outputs[0].token_ids) for each in out], file)


if __name__ == "__main__":  # vLLM starts its engine as a process that imports this file again
    main(json.loads(sys.argv[1]))
