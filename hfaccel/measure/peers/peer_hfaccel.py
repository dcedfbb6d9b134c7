"""hfaccel itself: the model patched with the recipe in `spec["variant"]`, through `model.generate`."""

import os
import sys


def load(spec):
    root = spec["import_root"]
    sys.path[:0] = (
        [root, os.path.join(root, "kernels")] if os.path.isdir(os.path.join(root, "kernels")) else [root]
    )
    import torch

    import hfaccel
    from hfaccel.measure.rows import load as load_model
    from hfaccel.measure.speed import generate_once

    torch.set_num_threads(spec["threads"])
    model, tokenizer = load_model(spec["model"], off_grid=spec["off_grid"], dtype=spec["dtype"])
    hfaccel.patch(model, spec["variant"], tokenizer=tokenizer, keep_original=False, progress=False)
    made = hfaccel.report(model)

    def run(prompt, new_tokens):
        return generate_once(model, torch.tensor(prompt), new_tokens)

    from hfaccel.measure.bench import bytes_per_token

    info = {"version": hfaccel.__version__, "bytes_per_token": bytes_per_token(model), "runs": made.runs}
    return run, info
