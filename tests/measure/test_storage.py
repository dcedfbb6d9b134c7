"""measure/storage.py: bits by the shapes' arithmetic, for every kind of matrix."""

import pytest

import hfaccel
from hfaccel.measure.storage import storage
from tiny import tiny

LAYERS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 112)


def test_an_original():
    found = storage(tiny("llama"))
    assert (found.weights, found.head_weights) == (LAYERS, 256 * 64)
    assert found.bits_per_weight == found.layer_bits_per_weight == 32


def test_codes_scales_and_zero_points():
    found = storage(hfaccel.patch(tiny("llama"), "int4"))
    # Widths 64: one group a row. 112: a group of 64 and a short one; a row's scale has 2 bytes, its zero one.
    rows = 2 * (64 + 64 + 32 + 32 + 112 + 112) + 2 * 64 * 2
    assert found.bytes == LAYERS // 2 + 3 * rows
    assert found.head_bytes == 256 * 64 + 4 * 256  # INT8
    assert found.bits_per_weight == pytest.approx(8 * (found.bytes + found.head_bytes) / (LAYERS + 256 * 64))


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "TX", "bert"])
def test_other_kinds_of_matrices(family):
    """Conv1D, fused experts (also transposed ones), models without a head that is rounded."""
    plain, packed = storage(tiny(family)), storage(hfaccel.patch(tiny(family), "int8"))
    assert (plain.weights, plain.head_weights) == (packed.weights, packed.head_weights)
    assert plain.layer_bits_per_weight == 32 and 8 < packed.layer_bits_per_weight < 9.2


def test_a_tied_head_counts_once():
    model = tiny("llama", tie_word_embeddings=True)
    assert storage(model).head_weights == 256 * 64
    assert storage(hfaccel.patch(model, "int8")).head_bytes == 256 * 64 + 4 * 256
