"""torchao on transformers: `variant` int8 (weight only) or int4."""

import peer_hf


def load(spec):
    return peer_hf.load(spec, loaded)


def scorer(spec):
    return peer_hf.scorer(spec, loaded)


def loaded(spec):
    import torchao
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    model, _ = peer_hf.loaded({**spec, "variant": "bf16"})
    quantize_(model, {"int8": Int8WeightOnlyConfig, "int4": Int4WeightOnlyConfig}[spec["variant"]]())
    return model, {"version": torchao.__version__}
