"""Adapters in the engine: every request gets what it gets alone with its adapter, and slots come back."""

import random
import shutil
import threading

import pytest
import torch

from hfaccel.generate import mixin
from hfaccel.lora.adapters import BadAdapter
from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Refused, Request, State
from hfaccel.serve.scheduler import Limits
from hfaccel.serve.server import Server
from hfaccel_kernels import native
from lora_folders import LINEARS, MLP, QV, adapter
from tiny import ids, tiny

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("HFACCEL_STRICT", "1")


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


def prompt_of(length, seed=0):
    return ids(1, length, seed=seed)[0].tolist()


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


def test_bad_adapters_change_nothing(known, tmp_path):
    _, folders, _ = known
    engine, prompt = engine_of(known), prompt_of(8)
    want, version = alone(engine, prompt, "a"), engine.slots.version
    for name, path in (("a", tmp_path), ("a", tmp_path / "nowhere"), ("", folders["a"])):
        with pytest.raises((BadAdapter, Refused)):
            engine.load_adapter(name, path)
    assert engine.slots.version == version and alone(engine, prompt, "a") == want
    assert sorted(engine.adapters) == ["a", "b", "c"]


def test_many_adapters_few_slots_under_random_traffic(known, tmp_path):
    """CASES L5: far more adapters than slots; each keeps being served, correct, from any thread."""
    model, _, _ = known
    count = 24
    for n in range(count):
        adapter(tiny("llama"), tmp_path / str(n), seed=100 + n, targets=QV, r=1 + n % 5)
    with Server(
        model, pages=64, lora_slots=3, adapters={str(n): tmp_path / str(n) for n in range(count)}
    ) as server:
        prompts = [prompt_of(6 + n % 3, seed=n % 3) for n in range(count)]
        want = [
            server.generate(prompt, adapter=str(n), max_new_tokens=4, ignore_eos=True).ids
            for n, prompt in enumerate(prompts)
        ]
        wrong = []

        def client(seed):
            draw = random.Random(seed)
            for _ in range(12):
                n = draw.randrange(count)
                got = server.generate(prompts[n], adapter=str(n), max_new_tokens=4, ignore_eos=True).ids
                if got != want[n]:
                    wrong.append((n, got, want[n]))

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert server.engine.slots.stats()["in_use"] == 0 and len(server.adapters()) == count
        assert len({tuple(ids) for ids in want}) > count // 2
