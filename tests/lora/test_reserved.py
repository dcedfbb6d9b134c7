"""reserved.py: the recipe step loraN, and who takes what it says."""

import pytest

import hfaccel
from hfaccel.errors import PatchError, UnknownName
from hfaccel.lora.reserved import LoRASlots, reserved
from hfaccel.serve.engine import Engine
from tiny import tiny


def test_the_step():
    assert LoRASlots().step() == "lora32" and LoRASlots.parse("32", []) == LoRASlots()
    assert LoRASlots.parse("4", ["r128"]) == LoRASlots(slots=4, max_rank=128)
    assert LoRASlots(slots=4, max_rank=128).step() == "lora4-r128"


def test_wrong_values():
    for wrong in ({"slots": 0}, {"slots": True}, {"max_rank": 1.5}, {"targets": ("**",)}):
        with pytest.raises(PatchError, match="LoRASlots"):
            LoRASlots(**wrong)
    for rest, options in (("", []), ("0", []), ("4", ["r0"]), ("4", ["r8", "r8"]), ("4", ["g8"])):
        with pytest.raises(UnknownName, match="lora32-r64"):
            LoRASlots.parse(rest, options)
    with pytest.raises(PatchError, match="does not generate"):
        hfaccel.patch(tiny("bert"), "lora8", progress=False)


def test_an_engine_takes_what_the_recipe_says(tmp_path):
    model = tiny("TL")
    hfaccel.patch(model, "int8+lora3-r8", progress=False)
    model.save_pretrained(tmp_path)
    for each in (model, hfaccel.from_pretrained(tmp_path)):
        assert reserved(each) == LoRASlots(slots=3, max_rank=8)
        slots = Engine(each, pages=4).slots
        assert (slots.count, slots.max_rank) == (3, 8)
        slots = Engine(each, pages=4, lora_slots=5).slots
        assert (slots.count, slots.max_rank) == (5, 8)
    hfaccel.unpatch(model)
    assert reserved(model) == LoRASlots()
