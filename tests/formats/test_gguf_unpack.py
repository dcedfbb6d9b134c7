import pytest
import torch

from formats.test_gguf_blocks import QUANTIZED, blocks_of
from hfaccel.errors import PatchError
from hfaccel.formats.gguf_encode import BLOCKS
from hfaccel.formats.gguf_pack import layout_of, pack_blocks
from hfaccel.formats.gguf_unpack import type_of, unpack_blocks
from hfaccel_kernels import super_scales
from hfaccel_kernels.layouts import Layout

WRITTEN = [block for block in QUANTIZED if block.name in BLOCKS]


@pytest.mark.parametrize("block", WRITTEN, ids=lambda block: block.name)
@pytest.mark.parametrize("n", [16, 37])
def test_packing_and_back_is_the_file_bit_for_bit(block, n):
    blocks = 3
    rows = blocks_of(block, n * blocks).view(n, -1)
    layout = layout_of(block.name, wide=False)
    packed = pack_blocks(rows, block, layout)
    k = blocks * block.size
    assert type_of(layout, k) == block.name
    back = unpack_blocks(packed["weight"], packed["weight_scale"], layout, n, k)
    assert torch.equal(back, rows)


def test_layouts_that_no_type_holds():
    assert type_of(Layout(4, 32, True, "fp16"), 64) == "Q4_0"
    assert type_of(Layout(4, 32, True, "fp16"), 48) is None  # a short last group
    assert type_of(Layout(4, 32, True, "fp32"), 64) is None
    assert type_of(Layout(4, 64, True, "fp16"), 64) is None
    assert type_of(Layout(4, 32, False, "fp16"), 64) is None
    assert type_of(Layout(4, 32, True, "fp16", code="nf4"), 64) is None
    assert type_of(layout_of("Q3_K", wide=False), 256) is None  # read, not written


def test_integer_scales_of_more_than_six_bits_are_refused():
    layout = layout_of("Q4_K", wide=False)
    factor = torch.ones(16, 1, dtype=torch.float16)
    codes = torch.full((16, 8), 64, dtype=torch.uint8)
    scale = super_scales.pack("super_min", (factor, codes), (factor, codes))
    weight = torch.zeros(layout.shapes(16, 256)["weight"][0], dtype=torch.uint8)
    with pytest.raises(PatchError, match="beyond 63"):
        unpack_blocks(weight, scale, layout, 16, 256)
