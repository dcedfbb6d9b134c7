"""Every block type against the `gguf` package, which reads the same bytes by code of its own."""

import gguf
import numpy as np
import pytest
import torch

from gguf_bytes import blocks_of
from hfaccel.formats import gguf_blocks
from hfaccel.formats.gguf_file import TYPES

QUANTIZED = [block for block in TYPES.values() if block.name not in gguf_blocks.FLOATS]


@pytest.mark.parametrize("block", QUANTIZED, ids=lambda block: block.name)
def test_every_quantized_type_decodes_to_the_bits_of_the_oracle(block):
    blocks = blocks_of(block, 400)
    wanted = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(block.number))
    found = gguf_blocks.decode(blocks, block.name)
    assert found.shape == (400, block.size)
    assert np.array_equal(found.numpy().view(np.uint32), wanted.view(np.uint32))


def test_sizes_are_those_of_the_oracle():
    for number, block in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (block.name, (block.size, block.bytes))


@pytest.mark.parametrize("block", QUANTIZED, ids=lambda block: block.name)
def test_parts_are_the_whole_block(block):
    """(d scale) (code - zero) + minimum, computed in fp64 and rounded once, is what decode gives."""
    blocks = blocks_of(block, 64)
    taken = gguf_blocks.parts(blocks, block.name)
    groups = taken.scales.shape[1]
    codes = taken.codes.double().view(64, groups, -1)
    if taken.m is None:
        exact = (codes - taken.zero) * taken.scales.double()[:, :, None]
    else:
        exact = codes * taken.scales.double()[:, :, None] + taken.minimums.double()[:, :, None]
    assert torch.equal(exact.float().view(64, -1), gguf_blocks.decode(blocks, block.name))


def test_bfloat16_keeps_subnormals_and_the_sign_of_zero():
    values = torch.tensor([[1e-39, 7e4, -0.0, -1e-39, 3.0]]).bfloat16()
    rows = values.view(torch.uint8)
    assert torch.equal(
        gguf_blocks.decode_rows(rows, "BF16", 2, torch.bfloat16).view(torch.int16), values.view(torch.int16)
    )
    exact = values.float()
    assert torch.equal(
        gguf_blocks.decode_rows(rows, "BF16", 2, torch.float32).view(torch.int32), exact.view(torch.int32)
    )


def test_rows_are_decoded_in_pieces_to_the_same_values(monkeypatch):
    block = TYPES[12]
    rows = blocks_of(block, 30).view(10, -1)
    whole = gguf_blocks.decode_rows(rows, "Q4_K", block.bytes, torch.float32)
    monkeypatch.setattr(gguf_blocks, "_CHUNK_BYTES", 3 * rows.shape[1])
    assert torch.equal(gguf_blocks.decode_rows(rows, "Q4_K", block.bytes, torch.float32), whole)
    assert torch.equal(gguf_blocks.decode_rows(rows, "Q4_K", block.bytes, torch.bfloat16), whole.bfloat16())
