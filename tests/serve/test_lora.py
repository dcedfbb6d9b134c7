"""Adapters in the engine: every request gets what it gets alone with its adapter, and slots come back."""

import random
import shutil
import threading

import pytest
import torch

from engines import exact, prompt_of
from hfaccel.generate import mixin
from hfaccel.lora.adapters import BadAdapter
from hfaccel.measure.adapters import random_adapters
from hfaccel.serve.budget import measured_kv_bytes_per_token
from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Refused, Request, State
from hfaccel.serve.scheduler import Limits
from hfaccel.serve.server import Server
from lora_folders import LINEARS, MLP, QV, adapter
from tiny import tiny

pytestmark = [exact, pytest.mark.usefixtures("strict")]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A patched model, folders of adapters, and PEFT's own models of them."""
    model, at = tiny("llama"), tmp_path_factory.mktemp("adapters")
    made = {"a": (QV, 4), "b": (LINEARS, 16), "c": (MLP, 8)}
    peft = {
        name: adapter(model, at / name, seed=n, targets=targets, r=r)
        for n, (name, (targets, r)) in enumerate(made.items())
    }
    mixin.install(model, page_tokens=4)
    return model, {name: at / name for name in made}, peft


def engine_of(known, **settings):
    model, folders, _ = known
    engine = Engine(model, **{"pages": 64, "lora_slots": 2, **settings})
    for name, path in folders.items():
        engine.load_adapter(name, path)
    return engine


def request(prompt, adapter=None, new=6, **options):
    return Request(prompt, Options(max_new_tokens=new, ignore_eos=True, **options), adapter=adapter)


def alone(engine, prompt, adapter, new=6):
    one = engine.submit(request(prompt, adapter, new))
    engine.drain()
    return one.output


def check_all_is_back(engine):
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["used_pages"] == stats["cached_pages"]
    assert engine.slots.stats()["in_use"] == 0


def test_a_request_alone_is_pefts_generate(known):
    model, _, peft = known
    engine, prompt = engine_of(known), prompt_of(9)
    answers = []
    for name in (None, "a", "b", "c"):
        oracle = model if name is None else peft[name]
        want = oracle.generate(
            input_ids=torch.tensor([prompt]),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(alone(engine, prompt, name))
        assert answers[-1] == want[0, 9:].tolist()
    assert len({tuple(answer) for answer in answers}) == 4  # they do change the answer
    check_all_is_back(engine)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_random_traffic_gives_each_what_it_gets_alone(known, prefix_cache):
    """Two slots for three adapters, chunks, preemption and shared beginnings: bit for bit, in any order."""
    draw = random.Random(5)
    plain = engine_of(known, prefix_cache=False)
    shared = prompt_of(10)
    asked = []
    for n in range(24):
        prompt = shared[: draw.randrange(4, 11)] + prompt_of(draw.randrange(1, 12), seed=n)
        asked.append((prompt, draw.choice([None, "a", "b", "c"])))
    want = [alone(plain, *one, new=24) for one in asked]
    engine = engine_of(known, pages=24, limits=Limits(token_budget=13), prefix_cache=prefix_cache)
    requests = [engine.submit(request(*one, new=24)) for one in asked]
    engine.drain()
    assert [one.output for one in requests] == want
    assert all(one.state is State.FINISHED for one in requests)
    check_all_is_back(engine)
    assert engine.slots.loads > 3 and engine.stats()["preemptions"] > 0


def test_one_prompt_under_two_adapters_shares_no_page(known):
    engine, prompt = engine_of(known), prompt_of(17)
    first = [alone(engine, prompt, name) for name in (None, "a", "b")]
    again = []
    for name in (None, "a", "b"):
        one = engine.submit(request(prompt, name))
        engine.drain()
        again.append(one.output)
        assert one.cached_tokens == 16
    assert again == first
    c = engine.submit(request(prompt, "c"))
    engine.drain()
    assert c.cached_tokens == 0


def test_a_replaced_adapter_is_another_one(known, tmp_path):
    model, folders, _ = known
    engine, prompt = engine_of(known), prompt_of(12)
    before, other = alone(engine, prompt, "a"), alone(engine, prompt, "b")
    running = engine.submit(request(prompt, "a"))
    for _ in range(3):
        engine.step()
    engine.load_adapter("a", folders["b"])
    late = engine.submit(request(prompt, "a"))
    engine.drain()
    assert running.output == before and late.output == other and late.cached_tokens == 0
    engine.unload_adapter("a")
    with pytest.raises(Refused, match="adapter 'a' is not loaded; loaded are b, c"):
        engine.submit(request(prompt, "a"))
    with pytest.raises(Refused, match="'a' is not loaded"):
        engine.unload_adapter("a")
    check_all_is_back(engine)


def test_unloaded_while_it_runs(known):
    engine, prompt = engine_of(known), prompt_of(12)
    want = alone(engine, prompt, "c")
    running = engine.submit(request(prompt, "c"))
    engine.step()
    engine.unload_adapter("c")
    engine.drain()
    assert running.output == want


def test_what_is_loaded_later_grows_the_tables_and_touches_nobody(known, tmp_path):
    model, folders, _ = known
    engine = Engine(model, pages=64, lora_slots=2)
    prompt = prompt_of(12)
    want = alone(engine, prompt, None, 12)
    running = engine.submit(request(prompt, None, 12))
    for _ in range(4):
        engine.step()
    engine.load_adapter("a", folders["a"])
    with_a = engine.submit(request(prompt, "a", 12))
    for _ in range(4):
        engine.step()
    engine.load_adapter("b", folders["b"])  # a larger rank, more modules
    with_b = engine.submit(request(prompt, "b", 12))
    engine.drain()
    assert running.output == want
    fresh = engine_of(known)
    assert with_a.output == alone(fresh, prompt, "a", 12) and with_b.output == alone(fresh, prompt, "b", 12)


def test_an_adapter_whose_file_is_gone_fails_its_requests_alone(known, tmp_path):
    model, folders, _ = known
    shutil.copytree(folders["a"], tmp_path / "x")
    engine, prompt = engine_of(known), prompt_of(8)
    want = alone(engine, prompt, "b")
    engine.load_adapter("x", tmp_path / "x")
    shutil.rmtree(tmp_path / "x")
    bad, good = engine.submit(request(prompt, "x")), engine.submit(request(prompt, "b"))
    engine.drain()
    assert bad.state is State.FAILED and isinstance(bad.error, BadAdapter) and "'x'" in str(bad.error)
    assert good.output == want
    check_all_is_back(engine)


def test_replaced_in_its_own_folder_while_requests_wait(known, tmp_path):
    """A new version saved over the old one: who was submitted with the old one gets the old one, though it
    loses its slot meanwhile; pages of the old one are gone at the end."""
    _, folders, _ = known
    engine, prompt = engine_of(known, pages=12, lora_slots=1), prompt_of(12)
    want = {name: alone(engine, prompt, name, 24) for name in ("a", "c")}
    shutil.copytree(folders["a"], tmp_path / "x")
    engine.load_adapter("x", tmp_path / "x")
    running = [engine.submit(request(prompt, "x", 24)) for _ in range(2)]
    for _ in range(3):
        engine.step()
    shutil.rmtree(tmp_path / "x")
    shutil.copytree(folders["c"], tmp_path / "x")
    old = engine.adapters["x"]
    engine.load_adapter("x", tmp_path / "x")
    engine.scheduler.preempt_all()
    first = engine.submit(request(prompt, "c", 24))
    first.arrival, first.order = -1.0, -1  # takes the only slot before them
    late = engine.submit(request(prompt, "x", 24))
    engine.drain()
    assert [one.output for one in running] == [want["a"]] * 2
    assert first.output == late.output == want["c"]
    assert not any(adapter is old for _, adapter in engine.tree.roots)
    assert not engine.slots.holds(old)
    check_all_is_back(engine)


def test_pages_and_slot_of_an_unloaded_adapter_are_free(known):
    engine, prompt = engine_of(known), prompt_of(17)
    alone(engine, prompt, "a")
    alone(engine, prompt, None)
    a, cached = engine.adapters["a"], engine.stats()["cached_pages"]
    engine.unload_adapter("a")
    assert engine.stats()["cached_pages"] == cached / 2 and not engine.slots.holds(a)
    check_all_is_back(engine)


def test_who_is_cancelled_before_a_step_lets_go_of_an_unloaded_adapter(known):
    engine, prompt = engine_of(known), prompt_of(17)
    alone(engine, prompt, "a")
    a, waiting = engine.adapters["a"], engine.submit(request(prompt, "a"))
    engine.unload_adapter("a")
    assert engine.slots.holds(a)
    engine.cancel(waiting)
    engine.drain()
    assert waiting.state is State.CANCELLED and not engine.slots.holds(a)
    assert not any(adapter is a for _, adapter in engine.tree.roots)
    check_all_is_back(engine)


def test_preempted_cancelled_and_swapped_with_adapters(known):
    """Slots and pages come back whatever ends a request, by both kinds of preemption."""
    for preemption in ("recompute", "swap"):
        plain = engine_of(known, prefix_cache=False)
        asked = [(prompt_of(9, seed=n), "abc"[n % 3]) for n in range(9)]
        want = [alone(plain, *one, new=20) for one in asked]
        limits = Limits(token_budget=17, preemption=preemption, stretch=None)
        engine = engine_of(known, pages=10, limits=limits)
        requests = [engine.submit(request(*one, new=20)) for one in asked]
        for n in range(12):
            engine.step()
            if n % 4 == 3:
                engine.cancel(requests[n // 4])
        engine.drain()
        assert [one.state for one in requests[:3]] == [State.CANCELLED] * 3
        assert [one.output for one in requests[3:]] == want[3:]
        assert engine.stats()["preemptions"] > 0
        check_all_is_back(engine)


def test_embeddings_have_the_adapter(known):
    model, _, peft = known
    engine, prompt = engine_of(known, limits=Limits(token_budget=5)), prompt_of(12)
    for name in (None, "a", "b"):
        one = engine.submit(request(prompt, name, 1, embed=True))
        beside = engine.submit(request(prompt_of(7), "c"))
        engine.drain()
        oracle = (model if name is None else peft[name]).base_model
        with torch.no_grad():
            ids_ = torch.tensor([prompt])
            whole = oracle(ids_) if name is None else oracle.model.model(ids_)
        want = whole.last_hidden_state[0].mean(0)
        assert (one.embedding - want).abs().max() < 1e-5 * want.abs().max() and beside.output
    check_all_is_back(engine)


def test_an_adapter_that_no_plan_can_serve_is_refused_and_the_others_go_on(known, monkeypatch):
    from hfaccel.runtime import Unsupported, plan_build

    model, folders, _ = known
    engine, prompt = Engine(model, pages=64, lora_slots=2), prompt_of(8)
    engine.load_adapter("a", folders["a"])
    want = alone(engine, prompt, "a", 12)
    running = engine.submit(request(prompt, "a", 12))
    for _ in range(3):
        engine.step()
    real = plan_build.adapters

    def refuse(builder, x, parts, layer):
        if any("down_proj" in name and name in builder.tables for name, _, _ in parts):
            raise Unsupported("no record for it")
        return real(builder, x, parts, layer)

    monkeypatch.setattr(plan_build, "adapters", refuse)
    tables = dict(engine.slots.tables)
    with pytest.raises(BadAdapter, match="adapter 'c' cannot be served.*no record for it"):
        engine.load_adapter("c", folders["c"])
    assert engine.slots.tables == tables and sorted(engine.adapters) == ["a"]
    engine.drain()
    assert running.output == want and alone(engine, prompt, "a", 12) == want


def test_the_budget_counts_the_slots(known, monkeypatch):
    model, folders, _ = known
    monkeypatch.setattr("hfaccel.serve.budget.memory_of", lambda model: 700 << 20)
    monkeypatch.setattr("hfaccel.serve.budget.OVERHEAD_HOST_BYTES", 600 << 20)
    limits = Limits(token_budget=8, max_running=10**6)
    settings = {"lora_slots": 64, "memory_utilization": 0.9, "limits": limits}
    bare = Engine(model, **settings)
    some = Engine(model, adapters={"b": folders["b"]}, **settings)
    page = some.pool.page_tokens * measured_kv_bytes_per_token(model, None)
    held = some.slots.stats()["bytes"]
    assert held > 50 * page
    assert bare.pool.capacity - some.pool.capacity == pytest.approx(held / page, abs=1)


def test_slots_beyond_the_memory_are_refused(known, monkeypatch):
    _, folders, _ = known
    engine = engine_of(known)
    monkeypatch.setattr("hfaccel.serve.adapters.free_bytes", lambda device: 100)
    engine.load_adapter("again", folders["a"])  # needs no more
    engine = Engine(known[0], pages=64, lora_slots=2)
    with pytest.raises(BadAdapter, match="2 slots of its size take .* GB more"):
        engine.load_adapter("a", folders["a"])
    assert not engine.adapters and not engine.slots.tables


def test_bad_adapters_change_nothing(known, tmp_path):
    _, folders, _ = known
    engine, prompt = engine_of(known), prompt_of(8)
    want, version = alone(engine, prompt, "a"), engine.slots.version
    for name, path in (("a", tmp_path), ("a", tmp_path / "nowhere"), ("", folders["a"])):
        with pytest.raises((BadAdapter, Refused)):
            engine.load_adapter(name, path)
    assert engine.slots.version == version and alone(engine, prompt, "a") == want
    assert sorted(engine.adapters) == ["a", "b", "c"]


def test_500_adapters_in_32_slots_under_random_traffic(known, tmp_path):
    """CASES L5: far more adapters than slots; each keeps being served, correct, from any thread."""
    model, _, _ = known
    count = 500
    names = [str(n) for n in range(count)]
    folders = random_adapters(model, tmp_path, names, rank=3, targets=QV, size=0.3)
    with Server(model, pages=400, lora_slots=32, adapters=folders) as server:
        prompts = [prompt_of(6 + n % 3, seed=n % 3) for n in range(count)]
        want = [
            server.generate(prompt, adapter=name, max_new_tokens=4, ignore_eos=True).ids
            for name, prompt in zip(names, prompts, strict=True)
        ]
        wrong = []

        def client(seed):
            draw = random.Random(seed)
            for _ in range(4):
                chosen = [draw.randrange(count) for _ in range(12)]
                options = [{"adapter": names[n]} for n in chosen]
                some = [prompts[n] for n in chosen]
                got = server.generate(some, options, max_new_tokens=4, ignore_eos=True)
                wrong.extend((n, one.ids) for n, one in zip(chosen, got, strict=True) if one.ids != want[n])

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        slots = server.engine.slots.stats()
        assert slots["loaded"] == 32 and slots["loads"] > count and slots["in_use"] == 0
        assert len(server.adapters()) == count
        assert len({tuple(ids) for ids in want}) > count // 2
