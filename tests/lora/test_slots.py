"""slots.py: which adapter lies where, and what its slot holds."""

import pytest
import torch
from safetensors.torch import load_file

from hfaccel.errors import PatchError
from hfaccel.lora.adapters import WEIGHTS, BadAdapter, read_adapter
from hfaccel.lora.slots import AdapterSlots
from lora_folders import LINEARS, MLP, QV, adapter
from tiny import tiny


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    model, at = tiny("llama"), tmp_path_factory.mktemp("adapters")
    adapter(model, at / "a", seed=1, targets=QV, r=4)
    adapter(model, at / "b", seed=2, targets=LINEARS, r=16)
    adapter(model, at / "c", seed=3, targets=MLP, r=8)
    return model, [read_adapter(name, at / name, model) for name in "abc"]


def filled(model, adapters, count):
    slots = AdapterSlots(model, slots=count)
    for one in adapters:
        slots.make_room(one)
    return slots


def check(slots, adapter):
    """The slot holds what the file has, and nothing where the file has nothing."""
    slot, named = slots.slot(adapter), set()
    for name, a, b in adapter.tensors():
        table, part = slots.tables[name], adapter.parts[name]
        assert table.rank[slot] == part.rank and float(table.scale[slot]) == pytest.approx(part.scale)
        assert torch.equal(table.a[slot, : part.rank], a) and not table.a[slot, part.rank :].any()
        assert torch.equal(table.b[slot, : part.rank], b.T) and not table.b[slot, part.rank :].any()
        named.add(name)
    for name in slots.tables.keys() - named:
        assert slots.tables[name].rank[slot] == 0


def test_three_adapters_in_two_slots_served_in_turn(known):
    """CASES L5: a slot taken over by an adapter with fewer targets keeps nothing of the one before."""
    model, (a, b, c) = known
    slots = filled(model, (a, b, c), 2)
    for one in (b, a, c, a, b, c, b):
        assert slots.acquire(one)
        check(slots, one)
        slots.release(one)
    assert slots.stats() | {"bytes": 0} == {"slots": 2, "loaded": 2, "in_use": 0, "loads": 5, "bytes": 0}


def test_slots_in_use_stay_and_the_least_recently_used_goes(known):
    model, (a, b, c) = known
    slots = filled(model, (a, b, c), 2)
    assert slots.acquire(a) and slots.acquire(b) and slots.acquire(a)
    assert not slots.acquire(c)
    slots.release(a)
    assert not slots.acquire(c)  # one request still holds it
    slots.release(b)
    where = slots.slot(b)
    assert slots.acquire(c) and slots.slot(c) == where
    check(slots, a)
    check(slots, c)
    assert slots.slot(None) == -1
    with pytest.raises(KeyError):
        slots.slot(b)


def test_larger_tables_keep_what_is_loaded(known):
    model, (a, b, c) = known
    slots = filled(model, (a,), 2)
    assert slots.acquire(a) and slots.version == len(a.parts)
    slots.make_room(b)
    check(slots, a)
    assert {table.a.shape[1] for table in slots.tables.values()} == {16}
    assert slots.acquire(b)
    before = slots.version
    slots.make_room(c)  # smaller: nothing is made anew
    assert slots.version == before
    check(slots, b)


def test_a_file_that_is_gone_leaves_the_slot_free(known, tmp_path):
    model, (a, *_) = known
    adapter(model, tmp_path / "x", targets=QV)
    bad = read_adapter("x", tmp_path / "x", model)
    slots = filled(model, (a, bad), 1)
    (tmp_path / "x" / WEIGHTS).unlink()
    for _ in range(2):
        with pytest.raises(BadAdapter):
            slots.acquire(bad)
    assert slots.acquire(a)
    check(slots, a)


def test_moved_models_begin_anew(known):
    _, (a, *_) = known
    model = tiny("llama")
    slots = filled(model, (a,), 1)
    assert slots.acquire(a)
    slots.release(a)
    model.bfloat16()
    slots.forget()
    assert slots.acquire(a)
    name = next(iter(a.parts))
    table, saved = slots.tables[name], load_file(a.path / WEIGHTS)
    want = saved[f"base_model.model.{name}.lora_A.weight"].bfloat16()
    assert table.a.dtype is torch.bfloat16 and torch.equal(table.a[0, : want.shape[0]], want)


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"slots": True}, {"max_rank": 1.5}])
def test_bad_numbers(known, wrong):
    with pytest.raises(PatchError, match="whole number"):
        AdapterSlots(known[0], **wrong)
