"""runtime/choice.py: what is measured, what follows from it, and that it is made once and repeated."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import hfaccel
from hfaccel.errors import CheckpointError
from hfaccel.generate import mixin
from hfaccel.runtime import choice
from hfaccel.runtime.choice import Choice
from tiny import ids, tiny

SLOW = Choice("modules", {"native": 3.0, "modules": 2.0}, {"native": 40.0, "modules": 30.0})
GREEDY = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)


@pytest.fixture(autouse=True)
def _measuring(monkeypatch):
    monkeypatch.setenv("HFACCEL_MEASURE", "1")
    monkeypatch.setenv("HFACCEL_STRICT", "1")


def patched(recipe="int8", family="llama", **fields):
    return hfaccel.patch(tiny(family, **fields), recipe, progress=False)


def never(*args, **kwargs):
    raise AssertionError("measured again")


def served_by(model):
    """The executor that a `generate` of the model ran on."""
    model.generate(ids(1, 6), **GREEDY)
    return dict(mixin.runtime(model).calls)


@pytest.mark.parametrize("recipe", ["int8", "runtime", "kv8"])
def test_both_are_timed_at_a_step_and_at_a_prompt(recipe, monkeypatch):
    monkeypatch.setattr(choice, "BUDGET_S", 60.0)  # also where a busy machine makes a step long
    monkeypatch.setattr(choice, "LONG_S", 60.0)
    state = torch.random.get_rng_state()
    model = patched(recipe)
    assert torch.equal(torch.random.get_rng_state(), state)
    found = mixin.runtime(model).choice
    for values in (found.decode_ms, found.prompt_ms):
        assert set(values) == {"native", "modules"} and min(values.values()) > 0
    assert (
        found.executor == "native" and found.prompt_tokens == 128
    )  # a step of Python costs more than this plan
    assert model.config.hfaccel["executor"] == "native"
    said = hfaccel.report(model).runs["generate"]
    assert "executor native" in said and f"modules {found.decode_ms['modules']:.3g} ms a token" in said
    assert mixin.runner_of(model).pool.used_pages == 0 and served_by(model) == {"native": 1}


@pytest.mark.parametrize(
    "native, modules, executor, said",
    [  # seconds of (one token, 8 tokens, the prompt)
        (
            (0.01, 0.02, 0.1),
            (0.02, 0.03, 0.2),
            "native",
            "native 10 ms, modules 20 ms a token; native 100 ms",
        ),
        (
            (0.02, 0.03, 0.2),
            (0.01, 0.02, 0.1),
            "modules",
            "a token (the plan is slower there); native 200 ms",
        ),
        ((0.01, 0.02, 0.2), (0.02, 0.03, 0.1), "native", "of prompt (the plan is slower there)"),
        (
            (0.02, 0.03, 0.1),
            (0.01, 0.02, 0.2),
            "native",
            "modules 10 ms a token (the plan is slower there); ",
        ),
        ((0.0102, 0.02, 0.1), (0.01, 0.02, 0.1), "native", "modules 10 ms a token; "),  # within the noise
        ((0.2, 0.3, 2.0), (0.1, 0.2, 1.0), "native", "not measured: a step takes 0.2 s"),
        ((0.02, 0.08, 0.0), (0.01, 0.07, 0.0), "modules", "modules 10 ms a token (the plan is slower there)"),
    ],
)
def test_what_follows_from_the_times(monkeypatch, native, modules, executor, said):
    times = {"native": native, "modules": modules}

    def best(self, tokens, past, repeats):
        return times[self.runner.executor.name][{1: 0, 8: 1}.get(tokens, 2)]

    monkeypatch.setattr(choice._Timed, "_best", best)
    found = choice.measure(patched())
    assert found.executor == executor and said in str(found)
    assert bool(found.prompt_ms) == (0 < native[2] < 1)
    assert set(found.barred()) == ({"native"} if executor == "modules" else set())


def test_the_faster_modules_serve_and_the_report_says_why(monkeypatch):
    monkeypatch.setattr(choice, "measure", lambda model, kv_bits: SLOW)
    model = patched()
    assert served_by(model) == {"modules": 1}  # and HFACCEL_STRICT takes it for no fallback
    said = hfaccel.report(model).runs["generate"]
    assert said.startswith("executor modules") and said.count("native 3 ms, modules 2 ms a token") == 1
    monkeypatch.setenv("HFACCEL_EXECUTOR", "native")
    assert served_by(model) == {"modules": 1, "native": 1}


@pytest.mark.parametrize("recipe", ["int8", "runtime"])
def test_the_choice_is_made_once_and_repeated(monkeypatch, tmp_path, recipe):
    monkeypatch.setattr(choice, "measure", lambda model, kv_bits: SLOW)
    model = patched(recipe)
    model.save_pretrained(tmp_path / "out")
    monkeypatch.setattr(choice, "measure", never)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        hfaccel.from_pretrained(tmp_path / "out"),
    ):
        assert twin.config.hfaccel["executor"] == "modules" and served_by(twin) == {"modules": 1}
        assert "as measured when it was patched" in hfaccel.report(twin).runs["generate"]
    twin.save_pretrained(tmp_path / "again")
    assert served_by(hfaccel.from_pretrained(tmp_path / "again")) == {"modules": 1}


def test_another_patch_is_another_choice(monkeypatch, tmp_path):
    monkeypatch.setattr(choice, "measure", lambda model, kv_bits: SLOW)
    model = patched("runtime")
    model.save_pretrained(tmp_path / "out")
    hfaccel.unpatch(model)
    assert not hasattr(model.config, "hfaccel")
    monkeypatch.setattr(choice, "measure", lambda model, kv_bits: Choice("native"))
    assert served_by(hfaccel.patch(model, "int8", progress=False)) == {"native": 1}
    plain = type(model).from_pretrained(tmp_path / "out")
    assert plain.config.hfaccel["executor"] == "modules"
    assert served_by(hfaccel.patch(plain, "int8", progress=False)) == {"native": 1}


def test_a_model_without_a_choice_is_measured_at_its_first_generate(monkeypatch, tmp_path):
    monkeypatch.setenv("HFACCEL_MEASURE", "0")
    model = patched("int8")
    assert not hasattr(model.config, "hfaccel") and served_by(model) == {"native": 1}
    model.save_pretrained(tmp_path / "out")
    monkeypatch.setenv("HFACCEL_MEASURE", "1")
    monkeypatch.setattr(choice, "measure", lambda model, kv_bits: SLOW)
    loaded = hfaccel.from_pretrained(tmp_path / "out")
    assert not hasattr(loaded.config, "hfaccel")
    assert served_by(loaded) == {"modules": 1} and loaded.config.hfaccel["executor"] == "modules"
    training = tiny("llama").train()
    hfaccel.patch(training, "int8", progress=False)
    assert not hasattr(training.config, "hfaccel") and served_by(training.eval()) == {"modules": 1}


def test_nothing_is_measured_where_there_is_no_choice(monkeypatch):
    assert choice.measure(patched("int8", "falcon")) is None  # no native plan
    assert choice.measure(patched("int8", "gpt2", max_position_embeddings=9)) is None
    monkeypatch.setattr(choice, "BUDGET_S", 60.0)  # a busy machine measures no prompt within a second
    few = choice.measure(patched("int8", "gpt2", max_position_embeddings=40))
    assert few.prompt_tokens == 36 and "for 36 tokens of prompt" in str(few)
    monkeypatch.setattr(choice, "measure", never)
    for name, value in (("HFACCEL_EXECUTOR", "modules"), ("HFACCEL_BACKEND", "reference")):
        with monkeypatch.context() as m:
            m.setenv(name, value)
            m.setenv("HFACCEL_STRICT", "0")
            assert not hasattr(patched("int8").config, "hfaccel")


def test_a_record_that_names_no_executor_is_no_choice(tmp_path):
    model = patched("runtime")
    model.config.hfaccel["executor"] = "../native"
    assert choice.recorded(model.config) is None
    model.config.hfaccel["extra"] = 1
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError, match="hfaccel="):
        hfaccel.from_pretrained(tmp_path / "out")


def test_a_model_that_was_measured_is_freed_without_the_collector():
    model = patched("int8")
    assert mixin.runtime(model).choice.decode_ms
    codes = weakref.ref(model.lm_head.weight)
    gc.disable()
    try:
        del model
        assert codes() is None
    finally:
        gc.enable()
