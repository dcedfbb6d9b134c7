"""slots.py: which adapter lies where, and what its slot holds."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hfaccel.errors import PatchError
from hfaccel.lora.adapters import read_adapter
from hfaccel.lora.folder import WEIGHTS, BadAdapter
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
    assert slots.acquire(a)
    slots.release(a)
    for _ in range(2):
        with pytest.raises(BadAdapter):
            slots.acquire(bad)
        check(slots, a)  # nobody has lost a slot for it
    assert slots.acquire(a) and slots.loads == 1


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, float("nan")), (torch.float32, -float("inf")), (torch.float16, 1e5)],
)
def test_values_that_are_no_numbers_are_refused_by_module(tmp_path, dtype, value):
    """1e5 is a number in the file and none in the fp16 of the model."""
    model = tiny("llama")
    adapter(model, tmp_path / "x", targets=QV)
    saved = load_file(tmp_path / "x" / WEIGHTS)
    key = next(key for key in saved if "layers.1" in key and key.endswith("lora_B.weight"))
    saved[key][3, 1] = value
    save_file(saved, tmp_path / "x" / WEIGHTS)
    model = model.to(dtype)
    slots = filled(model, [bad := read_adapter("x", tmp_path / "x", model)], 1)
    module = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
    with pytest.raises(BadAdapter, match=f"adapter 'x': {module} has values that are not finite"):
        slots.acquire(bad)
    assert slots.stats()["loaded"] == 0


def test_what_was_read_ahead_needs_no_file(known, tmp_path):
    model, (a, *_) = known
    adapter(model, tmp_path / "x", seed=7, targets=QV)
    one = read_adapter("x", tmp_path / "x", model)
    slots = filled(model, (a, one), 1)
    want = list(one.tensors())
    slots.stage(one)
    (tmp_path / "x" / WEIGHTS).unlink()
    assert slots.acquire(one)
    for name, m, n in want:
        assert torch.equal(slots.tables[name].a[0, :4], m) and torch.equal(slots.tables[name].b[0, :4], n.T)
    slots.keep(one)  # the slot goes to another and comes back
    slots.release(one)
    assert slots.acquire(a)
    check(slots, a)
    slots.release(a)
    assert slots.acquire(one)
    for name, m, _ in want:
        assert torch.equal(slots.tables[name].a[0, :4], m)
    slots.release(one)
    slots.drop(one)
    with pytest.raises(BadAdapter, match="cannot be read"):
        slots.acquire(one)


def test_read_ahead_in_another_dtype_is_read_again(known):
    _, (a, *_) = known
    model = tiny("llama")
    slots = filled(model, (a,), 1)
    slots.stage(a)
    model.bfloat16()
    slots.forget()
    assert slots.acquire(a)
    name, matrix, _ = next(a.tensors())
    assert torch.equal(slots.tables[name].a[0, :4], matrix.bfloat16())


def test_bytes_are_known_before_tables_are_made(known):
    model, (a, b, c) = known
    slots = AdapterSlots(model, slots=3)
    assert slots.bytes_for() == 0
    for some in ((a,), (a, c), (a, b, c)):
        want = slots.bytes_for(some)
        for one in some:
            slots.make_room(one)
        assert slots.stats()["bytes"] == slots.bytes_for() == want > 0


def test_without_memory_nothing_changes(known, monkeypatch):
    model, (a, b, _) = known
    slots = filled(model, (a,), 2)
    tables, version, made, table = dict(slots.tables), slots.version, [], slots._table

    def short(*sizes):
        made.append(sizes)
        if len(made) == 5:
            raise RuntimeError("can't allocate memory")
        return table(*sizes)

    monkeypatch.setattr(slots, "_table", short)
    with pytest.raises(BadAdapter, match="no memory for 2 slots"):
        slots.make_room(b)
    assert slots.tables == tables and slots.version == version


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
