"""pages.py: INT8 codes of keys and values, and where they are written."""

import pytest
import torch

from hfaccel_kernels.pages import cache_write, dequantize_kv, quantize_kv


def test_quantize_kv_rounds_within_half_a_step():
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    x[2, 1] = 0
    codes, scale = quantize_kv(x)
    assert codes.abs().amax() == 127 and scale[2, 1] == 0 and not codes[2, 1].any()
    torch.testing.assert_close(scale, x.abs().amax(-1) / 127)
    assert ((dequantize_kv(codes, scale) - x).abs() <= scale[..., None] * 0.50001).all()


@pytest.mark.parametrize("int8", [False, True])
def test_tokens_go_to_their_slots_and_nowhere_else(int8):
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 4)  # a head size of its own for V
    slots = torch.tensor([9, 0, 6])
    pools = [torch.full((3, 4, 2, d), 7.0) for d in (8, 4)]
    scales = [None, None]
    if int8:
        pools, scales = [p.to(torch.int8) for p in pools], [torch.full((3, 4, 2), -1.0) for _ in range(2)]
    cache_write(k, v, *pools, slots, *scales)
    for x, pool, scale in zip((k, v), pools, scales, strict=True):
        pool = pool.flatten(0, 1)
        rest = [slot for slot in range(12) if slot not in slots.tolist()]
        assert (pool[rest] == 7).all()
        if not int8:
            assert torch.equal(pool[slots], x)
            continue
        scale = scale.flatten(0, 1)
        assert (scale[rest] == -1).all()
        codes, wanted = quantize_kv(x)
        assert torch.equal(pool[slots], codes) and torch.equal(scale[slots], wanted)
