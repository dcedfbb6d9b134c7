"""gate.py: a model changes only while nobody generates with it, and a forked child is no prisoner."""

import copy
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import hfaccel
from hfaccel import swap
from hfaccel.errors import PatchError
from hfaccel.generate import gate, mixin
from tiny import ids, tiny

X = ids(1, 6, vocab=512)
GREEDY = dict(max_new_tokens=6, do_sample=False)


class Pause(BaseStreamer):
    """Stops a generation in its middle until it is told to go on."""

    def __init__(self):
        self.inside, self.go = threading.Event(), threading.Event()

    def put(self, value):
        self.inside.set()
        assert self.go.wait(30)

    def end(self):
        pass


def started(work):
    """A thread, and where its result or error will be."""
    out = []

    def run():
        try:
            out.append(work())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def finished(thread, out):
    thread.join(30)
    assert not thread.is_alive()
    if isinstance(out[0], BaseException):
        raise out[0]
    return out[0]


@pytest.fixture(params=["modules", "auto"])
def executor(request, monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", request.param)


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}])
def test_a_model_that_generates_is_not_changed(executor, mode):
    model = hfaccel.patch(tiny("TL"), "int8", progress=False)
    torch.manual_seed(0)
    want = model.generate(X, **GREEDY | mode)
    pause = Pause()
    torch.manual_seed(0)
    thread, out = started(lambda: model.generate(X, streamer=pause, **GREEDY | mode))
    assert pause.inside.wait(30)
    for change in (hfaccel.unpatch, lambda m: hfaccel.original(m).__enter__()):
        with pytest.raises(PatchError, match="a thread is generating with this model"):
            change(model)
    pause.go.set()
    assert torch.equal(finished(thread, out), want)
    hfaccel.unpatch(model)
    assert mixin.ATTRIBUTE not in vars(model) and gate.ATTRIBUTE not in vars(model)


def test_a_plain_model_that_generates_is_not_patched():
    model = tiny("TL")
    own, want = type(model), tiny("TL").generate(X, **GREEDY)
    pause = Pause()
    thread, out = started(lambda: model.generate(X, streamer=pause, **GREEDY))
    assert pause.inside.wait(30)
    with pytest.raises(PatchError, match=r"patch\(model\): a thread is generating"):
        hfaccel.patch(model, "int4", progress=False)
    assert type(model) is own and gate.ATTRIBUTE not in vars(model)
    pause.go.set()
    assert torch.equal(finished(thread, out), want)
    hfaccel.patch(model, "int4", progress=False)


@pytest.mark.parametrize("change", ["patch", "unpatch", "original", "failure"])
def test_a_generate_that_starts_meanwhile_waits_and_sees_the_result(executor, change, monkeypatch):
    """Whatever a thread gets, it is the tokens of one state of the model, never of a mixture."""
    model = tiny("TL")
    plain = model.generate(X, **GREEDY)
    patched = copy.deepcopy(model)
    patched = hfaccel.patch(patched, "int2", progress=False).generate(X, **GREEDY)
    assert not torch.equal(plain, patched)
    if change in ("unpatch", "original"):
        hfaccel.patch(model, "int2", progress=False)
    threads = []

    def meanwhile(*args, **kwargs):
        threads.append(started(lambda: model.generate(X, **GREEDY)))
        threads[0][0].join(0.3)
        assert threads[0][0].is_alive()  # it waits

    if change in ("patch", "failure"):
        real = swap.settle

        def settle(*args, **kwargs):
            meanwhile()
            if change == "failure":
                raise RuntimeError("in the middle")
            return real(*args, **kwargs)

        monkeypatch.setattr(swap, "settle", settle)
        try:
            hfaccel.patch(model, "int2", progress=False)
        except RuntimeError:
            assert change == "failure"
        want = patched if change == "patch" else plain
    elif change == "unpatch":
        restore = model._hfaccel.journal.restore
        monkeypatch.setattr(model._hfaccel.journal, "restore", lambda m: (meanwhile(), restore(m)))
        hfaccel.unpatch(model)
        want = plain
    else:
        with hfaccel.original(model):
            meanwhile()
            assert torch.equal(model.generate(X, **GREEDY), plain)
        want = patched
    assert torch.equal(finished(*threads[0]), want)
    assert torch.equal(model.generate(X, **GREEDY), want)


def test_the_signature_stays_and_copies_have_gates_of_their_own():
    import inspect

    plain, model = tiny("TL"), hfaccel.patch(tiny("TL"), "int8", progress=False)
    assert inspect.signature(model.generate) == inspect.signature(plain.generate)
    assert model.generate.__doc__ == plain.generate.__doc__
    pause = Pause()
    thread, out = started(lambda: model.generate(X, streamer=pause, **GREEDY))
    assert pause.inside.wait(30)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    answers = [twin.generate(X, **GREEDY) for twin in twins]
    with gate.alone(twins[0], "a change"):
        pass
    pause.go.set()
    want = finished(thread, out)
    assert all(torch.equal(answer, want) for answer in answers)
    assert mixin.runner_of(model).pool.used_pages == 0


FORK = """
import os, sys, threading, time
import torch
import hfaccel
from hfaccel.generate import mixin
from tiny import ids, tiny

torch.set_num_threads(2)
model = hfaccel.patch(tiny("TL"), "int8", progress=False)
x = ids(2, 9, vocab=512)
kwargs = dict(max_new_tokens=12, do_sample=False)
want = model.generate(x, **kwargs)
cache = model.generate(x, return_dict_in_generate=True, **kwargs)
ready, go = threading.Event(), threading.Event()

class Pause:
    def put(self, value):
        ready.set()
        go.wait()
    def end(self): pass

# Another thread is in the middle of a generation, and holds the pool's lock, when the fork comes.
other = threading.Thread(target=lambda: model.generate(x[:1], streamer=Pause(), **kwargs))
other.start()
ready.wait()
pool = mixin.runner_of(model).pool
held, done = threading.Event(), threading.Event()
def hold():
    with pool.lock:
        held.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if not child:
    code = 1
    try:
        del cache  # its pages go back to the parent's pool, whose lock was held
        told = mixin.explain(model)
        same = torch.equal(model.generate(x, **kwargs), want)
        beams = model.generate(x, num_beams=2, **kwargs).shape[0] == 2
        free = mixin.runner_of(model).pool.used_pages == 0
        hfaccel.unpatch(model)
        fresh = hfaccel.patch(tiny("TL"), "int8", progress=False)
        native = mixin.explain(fresh)["executor"]
        again = torch.equal(fresh.generate(x, **kwargs), want)
        print(told["executor"], told["passed_over"], same, beams, free, native, again, flush=True)
        code = 0
    finally:
        os._exit(code)
deadline = time.time() + 60
pid, status = 0, None
while not pid and time.time() < deadline:
    pid, status = os.waitpid(child, os.WNOHANG)
    time.sleep(0.05)
if not pid:
    os.kill(child, 9)
    os.waitpid(child, 0)
    status = "the child hangs"
done.set()
go.set()
other.join()
holder.join()
print("parent", status, mixin.explain(model)["executor"], torch.equal(model.generate(x, **kwargs), want))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_runs_modules_and_nobody_hangs():
    """Forked while one thread generates and another holds the pool: the child has a runner of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HFACCEL_STRICT": "1"}
    env.pop("HFACCEL_EXECUTOR", None)
    run = subprocess.run([sys.executable, "-c", FORK], env=env, capture_output=True, text=True, timeout=120)
    lines = run.stdout.splitlines()
    assert lines == [
        "modules {'native': 'a forked child: its threads stayed in the parent'} True True True native True",
        "parent 0 native True",
    ], run.stdout + run.stderr
