"""hfaccel itself, through `model.generate`: `variant` is a recipe, or bf16 / fp32 for `runtime` in it."""

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
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(spec["variant"])
    recipe = spec["variant"] if dtype is None else "runtime"
    how = {"off_grid": spec["off_grid"], "dtype": dtype or spec["dtype"], "packed": recipe == "runtime"}
    model, tokenizer = load_model(spec["model"], **how)
    hfaccel.patch(model, recipe, tokenizer=tokenizer, keep_original=False, progress=False)
    made = hfaccel.report(model)

    def run(prompt, new_tokens):
        return generate_once(model, torch.tensor(prompt), new_tokens)

    from hfaccel.measure.bench import bytes_per_token

    info = {"version": hfaccel.__version__, "bytes_per_token": bytes_per_token(model), "runs": made.runs}
    return run, info
