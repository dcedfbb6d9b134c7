"""GPTQModel with its defaults, groups of 64: `variant` sym or asym 4-bit weights. Scores only.

It quantizes in this process on the ids in `spec["calibration"]`, a JSON file of rows, and is then loaded from
what it saved, into its own PyTorch kernels: what a user of it would have.
"""

import json
import os
import tempfile
import time


def scorer(spec):
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, spec["threads"])))  # fewer than 2: it raises
    import gptqmodel
    import torch
    from peer_hf import rows_of

    torch.set_num_threads(spec["threads"])
    # It writes logs into the folder it runs in.
    os.chdir(os.path.dirname(spec["calibration"]))
    with open(spec["calibration"]) as file:
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in json.load(file)]
    config = gptqmodel.QuantizeConfig(bits=4, group_size=64, sym=spec["variant"] == "sym")
    start = time.perf_counter()
    # In fp32: CPUs without bf16 products take four times as long in its own choice, bf16.
    model = gptqmodel.GPTQModel.load(spec["folder"], config, device="cpu", dtype=torch.float32)
    model.quantize(rows, batch_size=1)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory(prefix="gptqmodel-") as place:
        model.save(place)
        backend = gptqmodel.BACKEND.TORCH
        loaded = gptqmodel.GPTQModel.load(place, device="cpu", backend=backend, dtype=torch.float16)
    return rows_of(loaded.model.eval()), {"version": gptqmodel.__version__, "patch_s": seconds}
