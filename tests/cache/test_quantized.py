"""quantized.py: the recipe step kv8."""

import pytest

from hfaccel.cache.quantized import KVCache
from hfaccel.errors import PatchError, UnknownName
from tiny import tiny


def test_step_and_dict_round_trip():
    assert KVCache().step() == "kv8" and KVCache.parse("8", []) == KVCache(bits=8)
    assert KVCache.from_dict(KVCache(bits=None).to_dict()) == KVCache(bits=None)


def test_refusals():
    for bits in (4, 0, True, "8"):
        with pytest.raises(PatchError, match="known are 8 and None"):
            KVCache(bits=bits)
    for rest, options in (("4", []), ("8", ["g32"]), ("", [])):
        with pytest.raises(UnknownName, match="known is kv8"):
            KVCache.parse(rest, options)
    with pytest.raises(PatchError, match="whole model"):
        KVCache(targets=("**",))
    with pytest.raises(PatchError, match="does not generate"):
        KVCache().check(tiny("bert"))
    KVCache().check(tiny("TL"))
