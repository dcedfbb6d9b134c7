"""GPTQModel with its defaults, groups of 64: `variant` sym or asym 4-bit weights. Scores only.

It quantizes in this process on the ids in `spec["calibration"]`, a JSON file of rows, and is then loaded from
what it saved, in fp16. Its linear layers are taken apart by its own code and multiplied in fp32: its kernels
for CPUs need a minute for 1,024 tokens in fp16 and round activations in bf16. Quantizing takes a quarter of
an hour of the demo model, so what it saved is kept in the folder `spec["cache"]`, with the seconds it took.
"""

import hashlib
import json
import os
import time
from pathlib import Path

SECONDS = "seconds.json"


def scorer(spec):
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, spec["threads"])))  # fewer than 2: it raises
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it compiles every layer, for a kernel that is not run
    import gptqmodel
    import torch
    from peer_hf import rows_of

    torch.set_num_threads(spec["threads"])
    # It writes logs into the folder it runs in.
    os.chdir(os.path.dirname(spec["calibration"]))
    place = _place(spec, gptqmodel.__version__)
    if not (place / SECONDS).is_file():
        made = place.with_name(f"{place.name}.{os.getpid()}")
        seconds = _quantized(gptqmodel, torch, spec, made)
        (made / SECONDS).write_text(json.dumps(seconds))
        os.replace(made, place)
    loaded = gptqmodel.GPTQModel.load(
        str(place), device="cpu", backend=gptqmodel.BACKEND.TORCH, dtype=torch.float16
    )
    info = {"version": gptqmodel.__version__, "patch_s": json.loads((place / SECONDS).read_text())}
    return rows_of(_in_fp32(torch, loaded.model.eval())), info


def _in_fp32(torch, model):
    packed = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "dequantize_weight")]
    if not packed:
        raise RuntimeError("none of its layers is packed")
    for name, layer in packed:
        weight = layer.dequantize_weight().T.float().contiguous()
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None)
        linear.weight.data = weight
        if layer.bias is not None:
            linear.bias.data = layer.bias.float()
        model.set_submodule(name, linear)
    return model.float()


def _place(spec, version):
    """Where the result of these weights, this text and this version is kept."""
    source = Path(spec["folder"])
    sizes = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.iterdir())
    seen = json.dumps([str(source.resolve()), sizes, spec["variant"], version])
    key = hashlib.sha256(seen.encode() + Path(spec["calibration"]).read_bytes()).hexdigest()[:16]
    return Path(spec["cache"]) / f"{source.name}-gptqmodel-{spec['variant']}-{key}"


def _quantized(gptqmodel, torch, spec, place):
    """Write the quantized model; the seconds that quantizing took."""
    with open(spec["calibration"]) as file:
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in json.load(file)]
    config = gptqmodel.QuantizeConfig(bits=4, group_size=64, sym=spec["variant"] == "sym")
    start = time.perf_counter()
    # In fp32: CPUs without bf16 products take four times as long in its own choice, bf16.
    model = gptqmodel.GPTQModel.load(spec["folder"], config, device="cpu", dtype=torch.float32)
    model.quantize(rows, batch_size=1)
    seconds = time.perf_counter() - start
    place.mkdir(parents=True)
    model.save(str(place))
    return seconds
