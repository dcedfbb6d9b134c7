import pytest

from hfaccel_kernels import layouts
from hfaccel_kernels.layouts import Layout
from packed import LAYOUTS, SHAPES, name, random_packed

GRIDS = sorted({(n, k) for _, n, k in SHAPES})


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
@pytest.mark.parametrize("n, k", GRIDS)
def test_stored_tensors_have_the_stated_shapes_and_bytes(layout, n, k):
    weight, scale, zero = random_packed(layout, n, k)
    given = {"weight": weight, "weight_scale": scale} | ({} if zero is None else {"weight_zero": zero})
    assert {key: (tuple(t.shape), t.dtype) for key, t in given.items()} == layout.shapes(n, k)
    assert layout.bytes(n, k) == sum(t.numel() * t.element_size() for t in given.values())


def test_bytes_are_the_arithmetic_of_bits_where_nothing_is_padded():
    n, k = 1536, 576
    for bits in (8, 4, 3, 2):
        codes = n * k * bits // 8
        assert Layout(bits, 64, True, "fp16").bytes(n, k) == codes + n * k // 64 * 2
        assert Layout(bits, -1, False).bytes(n, k) == codes + n * 4 + n


def test_chunks_never_cross_a_group():
    for layout in LAYOUTS:
        at = 0
        for start, stop in layout.chunks(576):
            longest = 576 if layout.act == "token" else layouts.ACT_CHUNK[layout.act_bits]
            assert start == at and 0 < stop - start <= longest
            if layout.group != -1:
                assert start // layout.group == (stop - 1) // layout.group
            at = stop
        assert at == 576


@pytest.mark.parametrize(
    "bad, word",
    [
        ({"bits": 7}, "bits=7"),
        ({"bits": 6, "symmetric": False}, "bits=6, symmetric=False"),
        ({"bits": 4, "scale_dtype": "fp16_min", "symmetric": False}, "a minimum goes with"),
        ({"bits": 8, "scale_dtype": "super_min"}, "a minimum goes with"),
        ({"bits": 4, "group": 0}, "group=0"),
        ({"bits": 4, "group": True}, "group=True"),
        ({"bits": 4, "group": -2}, "group=-2"),
        ({"bits": 4, "scale_dtype": "bf16"}, "bf16"),
        ({"bits": 4, "act_bits": 4}, "act_bits=4"),
        ({"bits": 4, "code": "fp4"}, "code='fp4'"),
        ({"bits": 8, "code": "nf4"}, "nf4 has 4"),
        ({"bits": 4, "code": "nf4", "symmetric": False}, "nf4 has no zero points"),
        ({"bits": 8, "code": "e4m3"}, "e4m3 goes with token"),
        ({"bits": 8, "act": "row"}, "act='row'"),
        ({"bits": 4, "act": "token"}, "goes with 8 bits"),
        ({"bits": 8, "act": "token", "group": 64}, "one group a row"),
        ({"bits": 8, "act_scale": 0.5}, "act_scale=0.5"),
        ({"bits": 8, "act": "token", "act_scale": float("nan")}, "act_scale=nan"),
        ({"bits": 8, "act": "token", "act_scale": 1e-60}, "act_scale=1e-60"),
        ({"bits": 8, "act": "token", "act_scale": 1e300}, "act_scale=1e\\+300"),
    ],
)
def test_a_layout_refuses_what_it_cannot_be(bad, word):
    with pytest.raises(ValueError, match=word):
        Layout(**bad)


def test_a_layout_survives_its_text():
    for layout in LAYOUTS:
        assert Layout.parse(layout.text) == layout
