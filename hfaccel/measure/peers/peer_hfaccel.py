"""hfaccel itself, through `model.generate` or `Server`.

`variant` is a recipe, or bf16 / fp32 for `runtime` in it.
"""

import atexit
import os
import shutil
import sys
import tempfile


def patched(spec):
    root = spec["import_root"]
    sys.path[:0] = (
        [root, os.path.join(root, "kernels")] if os.path.isdir(os.path.join(root, "kernels")) else [root]
    )
    import torch

    import hfaccel
    from hfaccel.measure.rows import load as load_model

    torch.set_num_threads(spec["threads"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(spec["variant"])
    recipe = spec["variant"] if dtype is None else "runtime"
    how = {"off_grid": spec["off_grid"], "dtype": dtype or spec["dtype"], "packed": recipe == "runtime"}
    model, tokenizer = load_model(spec["model"], **how)
    hfaccel.patch(model, recipe, tokenizer=tokenizer, keep_original=False, progress=False)
    from hfaccel.measure.bench import bytes_per_token

    runs = hfaccel.report(model).runs
    info = {"version": hfaccel.__version__, "bytes_per_token": bytes_per_token(model), "runs": runs}
    return model, tokenizer, info


def load(spec):
    model, _, info = patched(spec)
    import torch

    from hfaccel.measure.speed import generate_once

    def run(prompt, new_tokens):
        return generate_once(model, torch.tensor(prompt), new_tokens)

    return run, info


def server(spec):
    model, tokenizer, info = patched(spec)
    from hfaccel.measure.adapters import random_adapters
    from hfaccel.serve.server import Server

    made = {}
    if names := spec.get("adapters"):
        folder = tempfile.mkdtemp(prefix="hfaccel-adapters-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        made = random_adapters(model, folder, names, rank=spec["rank"], targets=spec["targets"])
    return Served(Server(model, tokenizer, adapters=made, **spec["options"])), info


class Served:
    """A target of `traffic` over our server in this process."""

    def __init__(self, server):
        self.server = server

    def send(self, job, record):
        opened = []

        def sink(part):
            if part.token is not None:
                record.came()
            elif part.answer is not None:
                record.over()
            else:
                record.over(error_of(opened))

        options = {"max_new_tokens": job["new_tokens"], "ignore_eos": True, "adapter": job.get("adapter")}
        try:
            opened.append(self.server.open(job["prompt"], sink, **options))
        except ValueError as error:  # refused
            record.over(error)


def error_of(opened):
    """Why a request has no answer; a request may be over before `open` returned it."""
    try:
        opened[0].answer()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no answer"
