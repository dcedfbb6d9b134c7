"""int32 words of small integers."""

import pytest
import torch

from exported import nibbles
from hfaccel.formats import words
from hfaccel.formats.awq import ORDER


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing_is_undone(bits):
    values = torch.randint(0, 1 << bits, (5, 96), dtype=torch.uint8)
    packed = words.pack(values, bits)
    assert packed.dtype == torch.int32 and packed.shape == (5, 96 * bits // 32)
    assert torch.equal(words.unpack(packed, bits, 96), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_values_follow_each_other_from_the_lowest_bit(bits):
    values = torch.randint(0, 1 << bits, (32,), dtype=torch.uint8)
    stream = sum(word % (1 << 32) << 32 * i for i, word in enumerate(words.pack(values, bits).tolist()))
    assert stream == sum(value << bits * i for i, value in enumerate(values.tolist()))


def test_awq_interleaves_eight_values():
    values = torch.arange(8, dtype=torch.uint8)
    packed = words.pack(values, 4, ORDER)
    assert nibbles(int(packed)) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(words.unpack(packed, 4, 8, ORDER), values)


@pytest.mark.parametrize("n", [1, 7, 9])
def test_a_word_that_is_not_full_is_filled_with_zeros(n):
    values = torch.full((n,), 15, dtype=torch.uint8)
    packed = words.pack(values, 4)
    assert sum(map(nibbles, packed.tolist()), [])[n:] == [0] * (-n % 8)
    assert torch.equal(words.unpack(packed, 4, n), values)
