"""GGUF files of tiny models: written by us, and of random blocks."""

import shutil

import gguf
import torch

from gguf_bytes import BY_NAME, blocks_of
from hfaccel.formats import gguf_out
from hfaccel.formats.gguf_file import GGUFFile
from tiny import tiny


@torch.no_grad()
def logits(model, prompt):
    return model(prompt).logits


def written(model, path, variant="F32"):
    gguf_out.write(model, None, variant, path, progress=False)
    return path


SIZES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 512}


def of_blocks(kind, path, *, family="llama", head=None, **config):
    """A file whose matrices are random blocks of one type, norms and biases a random model's."""
    model = tiny(family, **{**(SIZES if family == "llama" else {}), **config})
    written(model, path)
    file = GGUFFile(path)
    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(again := path.with_suffix(".again"), file.metadata["general.architecture"])
    for key, value in file.metadata.items():
        if key.startswith(f"{file.metadata['general.architecture']}."):
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
    for seed, (name, info) in enumerate(file.tensors.items()):
        if len(info.shape) == 1 or "ffn_gate_inp" in name or name == "position_embd.weight":
            writer.add_tensor(name, file.rows(name).view(torch.float32).reshape(info.shape).numpy())
            continue
        used = gguf.GGMLQuantizationType[head] if head and name == "output.weight" else number
        block = BY_NAME[used.name]
        k = info.shape[-1]
        small = blocks_of(block, info.bytes // 4 // k * (k // block.size), seed, top=0x1000)
        rows = small.view(*info.shape[:-1], -1).numpy()
        writer.add_tensor(name, rows, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.move(again, path)
    return path


def unrounded(x, layout):
    """Activations as they are, in the form of codes and scales."""
    return x, torch.ones(x.shape[0], len(layout.chunks(x.shape[1])))
