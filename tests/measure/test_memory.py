"""measure/memory.py: its figures on a tiny shape against the arithmetic of codes and scales."""

import pytest

from hfaccel.measure import memory

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
LINEARS = 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 320)
FLOATS = 512 * 128 + 7 * 128  # the embedding and the norms


@pytest.mark.parametrize(("recipe", "bits", "a_row"), [("int8", 8, 4), ("int4", 4, 3 * 2)])
def test_weights_are_codes_and_scales(recipe, bits, a_row):
    """Widths are whole groups of 64: 2 a row of 128; `down_proj` has 5 a row of 320."""
    found = memory.measure("fp32", recipe, SHAPE)
    rows = 3 * (128 + 64 + 64 + 128 + 320 + 320)
    down = 3 * 128 * (4 if recipe == "int8" else 3 * 5)
    head = 512 * 128 + 512 * 4  # INT8 beside any recipe
    buffers = found["original_bytes"] - 4 * (LINEARS + 512 * 128 + FLOATS)
    wanted = LINEARS * bits // 8 + rows * a_row + down + head + 4 * FLOATS + buffers
    assert 0 <= buffers < 1024
    assert found["arithmetic_bytes"] == wanted == found["weight_bytes"]
    assert found["packed_share"] == 1.0


def test_a_table_has_a_row_for_every_measurement():
    found = memory.measure("bf16", "int4", SHAPE)
    lines = memory.text([found]).splitlines()
    assert len(lines) == 3 and lines[0].split()[:2] == ["original", "recipe"]
    assert lines[2].split()[:2] == ["bf16", "int4"] and "100.0 %" in lines[2]
