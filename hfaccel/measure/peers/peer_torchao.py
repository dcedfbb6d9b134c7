"""torchao on transformers: `variant` int8 (weight only) or int4."""


def load(spec):
    from peer_hf import runner

    model, info = loaded(spec)
    return runner(model), info


def scorer(spec):
    from peer_hf import rows_of

    model, info = loaded(spec)
    return rows_of(model), info


def loaded(spec):
    import torch
    import torchao
    import transformers
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    torch.set_num_threads(spec["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=torch.bfloat16).eval()
    quantize_(model, {"int8": Int8WeightOnlyConfig, "int4": Int4WeightOnlyConfig}[spec["variant"]]())
    return model, {"version": torchao.__version__}
