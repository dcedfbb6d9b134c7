import pytest
import torch

from gguf_bytes import BY_NAME, blocks_of
from hfaccel.formats.gguf_blocks import decode_rows
from hfaccel.formats.gguf_pack import GRIDS, layout_of, pack_blocks
from hfaccel_kernels.packing import dequantize

QUANTIZED = [BY_NAME[name] for name in GRIDS]


@pytest.mark.parametrize("block", QUANTIZED, ids=lambda block: block.name)
@pytest.mark.parametrize("wide", [False, True])
def test_a_packed_tensor_is_the_file_s_bit_for_bit(block, wide):
    n, blocks = 37, 3
    rows = blocks_of(block, n * blocks).view(n, -1)
    layout = layout_of(block.name, wide=wide)
    packed = pack_blocks(rows, block, layout)
    k = blocks * block.size
    assert {name: (tuple(t.shape), t.dtype) for name, t in packed.items()} == layout.shapes(n, k)
    found = dequantize(packed["weight"], packed["weight_scale"], None, layout, n, k)
    wanted = decode_rows(rows, block.name, block.bytes, torch.float32)
    assert torch.equal(found, wanted)  # 0 and -0 are one: integers have no sign of zero


@pytest.mark.parametrize("kind, most", [(kind, 1.34 if kind in ("Q2_K", "Q3_K") else 1.03) for kind in GRIDS])
def test_bytes_are_near_the_file_s(kind, most):
    block = BY_NAME[kind]
    n, k = 64, 1024
    assert layout_of(kind, wide=False).bytes(n, k) <= most * (n * k // block.size * block.bytes)


def test_pieces_of_rows_do_not_change_a_bit(monkeypatch):
    block = BY_NAME["Q4_K"]
    rows = blocks_of(block, 100).view(100, -1)
    layout = layout_of("Q4_K", wide=False)
    whole = pack_blocks(rows, block, layout)
    monkeypatch.setattr("hfaccel.formats.gguf_pack._CHUNK_ELEMENTS", 256 * 32)
    pieces = pack_blocks(rows, block, layout)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
