"""However a generation ends, its pages return, and the model goes on: errors, interrupts, threads, copies."""

import copy
import gc
import pickle
import threading
import time

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hfaccel.generate import mixin
from tiny import ids, tiny

X = ids(2, 9, vocab=512)
NEW = 8
MODES = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True, num_return_sequences=3),
    "beams": dict(do_sample=False, num_beams=3),
    "lookup": dict(do_sample=False, prompt_lookup_num_tokens=2),
}


@pytest.fixture(params=["modules", "auto"], autouse=True)
def executor(request, monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", request.param)


@pytest.fixture
def make():
    def made(kv_bits=None):
        model = tiny("TL")
        mixin.install(model, kv_bits=kv_bits, page_tokens=4)
        return model

    return made


def inputs(mode):
    return X[:1] if mode == "lookup" else X


def pages(model):
    gc.collect()
    pool = mixin.runner_of(model).pool
    return pool.used_pages, pool.capacity


class Counting:
    """Fails the third time."""

    def __init__(self, error):
        self.calls, self.error = 0, error

    def count(self):
        self.calls += 1
        if self.calls == 3:
            raise self.error("now")


class Processor(Counting, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.count()
        return scores


class Criteria(Counting, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer(Counting):
    def put(self, value):
        self.count()

    def end(self): ...


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_the_callers_code(make, mode, kv_bits, error):
    model = make(kv_bits)
    kwargs = dict(max_new_tokens=NEW, pad_token_id=0, **MODES[mode])
    torch.manual_seed(0)
    want = model.generate(inputs(mode), **kwargs)
    for where in (
        dict(logits_processor=LogitsProcessorList([Processor(error)])),
        dict(stopping_criteria=StoppingCriteriaList([Criteria(error)])),
        *([] if mode == "beams" else [dict(streamer=Streamer(error))]),
    ):
        with pytest.raises(error, match="now"):
            model.generate(inputs(mode), **kwargs, **where)
        assert pages(model) == (0, 0)
        assert vars(model)["_hfaccel_gate"].active == 0
    torch.manual_seed(0)
    assert torch.equal(model.generate(inputs(mode), **kwargs), want)
    assert pages(model) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_a_forward(make, mode):
    model = make()
    kwargs = dict(max_new_tokens=NEW, pad_token_id=0, **MODES[mode])
    torch.manual_seed(0)
    want = model.generate(inputs(mode), **kwargs)
    left = [3]

    def fail(*_):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.generate(inputs(mode), **kwargs)
    hook.remove()
    assert pages(model) == (0, 0)
    torch.manual_seed(0)
    assert torch.equal(model.generate(inputs(mode), **kwargs), want)


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_max_time_ends_a_generation(make, mode):
    model = make()
    out = model.generate(X, max_time=0.0, max_new_tokens=40, pad_token_id=0, **MODES[mode])
    assert X.shape[1] < out.shape[1] <= X.shape[1] + 2 and pages(model) == (0, 0)


def test_threads_in_every_mode_on_one_model(make):
    """Each gets what it gets alone, while others fail, finish and copy the model."""
    model = make()
    work = [("greedy", 5), ("beams", 12), ("lookup", 17), ("greedy", 21), ("beams", 4)]
    jobs = [(ids(1, n, seed=n, vocab=512), dict(max_new_tokens=NEW, **MODES[mode])) for mode, n in work]
    want = [model.generate(x, **kwargs) for x, kwargs in jobs]
    got, copies, failed = [None] * len(jobs), [], []

    def run(i):
        x, kwargs = jobs[i]
        for _ in range(3):
            got[i] = model.generate(x, **kwargs)

    def fails():
        for _ in range(4):
            try:
                processors = LogitsProcessorList([Processor(RuntimeError)])
                model.generate(X, max_new_tokens=NEW, logits_processor=processors)
            except RuntimeError:
                failed.append(1)

    def copy_it():
        for how in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
            copies.append(how(model).generate(jobs[0][0], **jobs[0][1]))
            time.sleep(0.01)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    threads += [threading.Thread(target=fails), threading.Thread(target=copy_it)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(failed) == 4 and len(copies) == 2 and all(torch.equal(c, want[0]) for c in copies)
    assert pages(model) == (0, 0)


def test_a_returned_cache_holds_its_pages_until_it_goes(make):
    model = make()
    for mode in ("greedy", "beams"):
        out = model.generate(X, max_new_tokens=NEW, return_dict_in_generate=True, **MODES[mode])
        assert pages(model)[0] > 0
        twin = copy.deepcopy(out)
        del out
        assert pages(model)[0] > 0
        del twin
        assert pages(model) == (0, 0)
