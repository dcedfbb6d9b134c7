"""OpenVINO GenAI: `variant` int8, int4 (symmetric, group 64) or bf16; converted once into `artifact`."""

import os


def load(spec):
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    if not os.path.exists(os.path.join(spec["artifact"], "openvino_model.xml")):
        _convert(spec)
    pipe = genai.LLMPipeline(spec["artifact"], "CPU", INFERENCE_NUM_THREADS=spec["threads"])

    def run(prompt, new_tokens):
        ids = ov.Tensor(np.array(prompt, dtype=np.int64))
        mask = ov.Tensor(np.ones((len(prompt), len(prompt[0])), dtype=np.int64))
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        result = pipe.generate(genai.TokenizedInputs(ids, mask), config)
        metrics = result.perf_metrics
        return metrics.get_ttft().mean / 1e3, metrics.get_generate_duration().mean / 1e3

    return run, {"version": genai.__version__}


def _convert(spec):
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    config = {
        "int8": lambda: OVWeightQuantizationConfig(bits=8, sym=True),
        "int4": lambda: OVWeightQuantizationConfig(
            bits=4, sym=True, group_size=spec.get("group", 64), ratio=1.0
        ),
        "bf16": lambda: None,
    }[spec["variant"]]()
    model = OVModelForCausalLM.from_pretrained(
        spec["folder"],
        export=True,
        compile=False,
        quantization_config=config,
        load_in_8bit=False if config is None else None,
    )
    model.save_pretrained(spec["artifact"])
    tokenizer = AutoTokenizer.from_pretrained(spec["folder"])
    import openvino as ov

    made, back = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(made, os.path.join(spec["artifact"], "openvino_tokenizer.xml"))
    ov.save_model(back, os.path.join(spec["artifact"], "openvino_detokenizer.xml"))
