"""Damaged headers: each is read as what it says or refused with a PatchError, and nothing large is made."""

import logging
import math
import random
import struct
import tracemalloc

import psutil
import pytest
import torch

from gguf_bytes import File, Tensor
from gguf_models import written
from hfaccel.errors import PatchError
from hfaccel.formats import gguf_out
from hfaccel.formats.gguf import GGUFModel
from hfaccel.formats.gguf_file import GGUFFile
from hfaccel.formats.gguf_tokenizer import tokenizer_of
from tiny import tiny
from vocabularies import byte_level

EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def whole(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    more = {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 2}
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    if request.param == "gemma3":
        small |= more | {"num_hidden_layers": 2}
    gguf_out.write(tiny(request.param, **small), byte_level(), "Q8_0", path, progress=False)
    return path.read_bytes(), min(info.start for info in GGUFFile(path).tensors.values())


def damaged(whole: bytes, header: int, dice: random.Random) -> bytes:
    """The file with some bytes of its header changed, cut out or put in, a number made extreme, or an end."""
    out = bytearray(whole)
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        at = dice.randrange(header)
        kind = dice.randrange(8)
        if kind <= 2:
            out[at] = dice.randrange(256)
        elif kind == 3:
            out[at] ^= 1 << dice.randrange(8)
        elif kind == 4:
            out[at : at + 8] = struct.pack("<Q", dice.choice(EXTREMES))
        elif kind == 5:
            out[at : at + 4] = struct.pack("<I", dice.choice(EXTREMES) % 2**32)
        elif kind == 6:
            del out[at : at + dice.randrange(1, 9)]
        elif dice.randrange(4):
            out[at:at] = dice.randbytes(dice.randrange(1, 9))
        else:
            del out[at:]
            break
    return bytes(out)


def survives(whole: bytes, header: int, path, count: int, seed: int, load_every: int) -> int:
    """How many of `count` damaged files were refused."""
    dice, refused = random.Random(seed), 0
    for number in range(count):
        path.write_bytes(damaged(whole, header, dice))
        try:
            model = GGUFModel(path)
            tokenizer_of(path)
            if number % load_every == 0:
                model.load()
        except PatchError as error:
            assert str(path) in str(error), error
            refused += 1
    return refused


def run(whole, path, count, seed, load_every, caplog):
    caplog.set_level(logging.ERROR)
    before = psutil.Process().memory_info().rss
    tracemalloc.start()
    try:
        refused = survives(*whole, path, count, seed, load_every)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count // 4 < refused < count  # both happen: the damage is neither trivial nor total
    assert peak < 20_000_000
    assert psutil.Process().memory_info().rss - before < 300_000_000


FAMILIES = {
    "llama": {},
    "mixtral": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "phi3": {},
    "gpt2": {},
    "falcon": {},
    "starcoder2": {},
}
VALUES = (0, 3, 2**31 - 1, 0.0, math.nan, "x", [1, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_key(family, tmp_path):
    """A model is made of it, or an error names the file and most often the key."""
    file = GGUFFile(written(tiny(family, **FAMILIES[family]), tmp_path / "m.gguf"))
    kept = {name: file.rows(name).numpy().tobytes() for name in file.tensors}
    tensors = [Tensor(t.name, t.shape, t.type.number, kept[t.name]) for t in file.tensors.values()]
    path, refused, named, tried = tmp_path / "bad.gguf", 0, 0, 0
    for key in file.metadata:
        if not key.startswith("general."):
            for value in VALUES:
                metadata = [*(item for item in file.metadata.items() if item[0] != key), (key, value)]
                path.write_bytes(File(metadata, tensors).bytes())
                tried += 1
                try:
                    GGUFModel(path).dense(torch.float32)
                except PatchError as error:
                    assert str(path) in str(error), error
                    refused += 1
                    named += key in str(error)
    assert refused > tried // 2 and named > refused // 2


def test_damaged_headers(whole, tmp_path, caplog):
    run(whole, tmp_path / "bad.gguf", 150, 1, 10, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 15))
def test_ten_thousand_damaged_headers(whole, tmp_path, caplog, seed):
    run(whole, tmp_path / "bad.gguf", 1000, seed, 50, caplog)
