"""Decode steps captured once and replayed, under the rules of a capture and without a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfaccel.attention import backend
from hfaccel.errors import PatchError
from hfaccel.generate import mixin
from hfaccel.lora.adapters import read_adapter
from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime import Unsupported, graphs, modules, runner
from hfaccel.runtime.graphs import Graphs
from lora_folders import LINEARS, adapter
from runners import dense, running
from tiny import ids, tiny


@pytest.fixture(autouse=True)
def _modules_only(monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")


class Capturing(TorchDispatchMode):
    """Refuses what a CUDA stream that is being captured would: a look at what a tensor holds, a shape that
    depends on it, a tensor made from host data."""

    FORBIDDEN = {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
        "lift_fresh",
        "_unique2",
        "bincount",
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        ragged = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        mask = name == "index" and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if name in self.FORBIDDEN or ragged or mask:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        return func(*args, **(kwargs or {}))


def on_host(*args, **kwargs):
    raise RuntimeError("a look at a tensor is not permitted when a stream is capturing")


def stub(run):
    """A capture without a GPU: the second run under the rules of a capture; replay computes again into the
    same tensor."""
    run()
    with pytest.MonkeyPatch.context() as patch, Capturing():
        for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, on_host)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # transformers asks
        out = run().clone()
    return lambda: out.copy_(run()), out


def kernel(q, k, v, tables, starts, lengths, *, scale=None, window=None, softcap=None, sinks=None, rows=None,
           k_scale=None, v_scale=None):  # fmt: skip
    """Decode attention as a GPU kernel sees it: nothing depends on what lengths and tables hold."""
    assert rows is None
    k, v = (
        (x if s is None else x * s[..., None])[tables.clamp_min(0).long()].flatten(1, 2)
        for x, s in ((k, k_scale), (v, v_scale))
    )  # [B, S, G, D]
    ratio = q.shape[1] // k.shape[2]
    k, v = (x.to(q.dtype).repeat_interleave(ratio, dim=2) for x in (k, v))
    scores = torch.einsum("bhd,bshd->bhs", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(k.shape[1])
    seen = at < lengths[:, None]
    if window is not None:
        seen = seen & (at >= lengths[:, None] - window)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(len(q), -1, 1)], dim=2)
    return torch.einsum("bhs,bshd->bhd", scores.softmax(-1)[..., : k.shape[1]], v)


@pytest.fixture
def gpu(monkeypatch):
    """Decode of a captured graph by a kernel that needs nothing of the host; the rest as it is on a CPU."""
    real, rows = backend.paged_attention, backend.Step.host_rows

    def attention(q, k, v, tables, starts, lengths, **kwargs):
        return (kernel if kwargs["rows"] is None else real)(q, k, v, tables, starts, lengths, **kwargs)

    def host_rows(step, device):
        return None if step.block_tables.shape[1] == graphs.BLOCKS else rows(step, device)

    monkeypatch.setattr(backend, "paged_attention", attention)
    monkeypatch.setattr(backend.Step, "host_rows", host_rows)


def captured(model, run, capture=stub):
    run.refresh()  # what the runner compares at each call is the model as it is now
    run.executor = executor = Graphs(model, capture=capture, device="cpu")
    return executor


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("family", ["TL", "gemma2", "qwen3", "gpt2", "phi3", "mistral"])
def test_graphs_replay_equals_modules(family, kv_bits, gpu):
    """Buckets of static inputs, rows that fill them up, growth of the pool and tables, rows that leave; what
    is captured waits for nothing on the host."""
    model, run = running(family, kv_bits=kv_bits)
    prompts = [ids(1, n, seed=n)[0] for n in (3, 9, 14)]
    rows = [p.clone() for p in prompts]
    executor = captured(model, run)
    sequences = [run.sequence() for _ in prompts]
    logits = run.prefill(prompts, [torch.arange(len(p)) for p in prompts], sequences)
    plain = modules.Modules(model)
    alive = [0, 1, 2]
    for step in range(8):
        if step == 4:
            sequences[1].free()
            alive, logits = [0, 2], logits[[0, 2]]
        if kv_bits is None:
            for b, row in zip(alive, logits, strict=True):
                torch.testing.assert_close(row, dense(model, rows[b])[-1], atol=1e-4, rtol=0)
        tokens = logits.argmax(-1)
        for b, token in zip(alive, tokens, strict=True):
            rows[b] = torch.cat([rows[b], token[None]])
        positions = torch.tensor([len(rows[b]) - 1 for b in alive])
        mine = [sequences[b] for b in alive]
        args = (tokens, positions, mine, [1] * len(alive), torch.arange(len(alive)).flip(0))
        logits = run.step(*args).flip(0)
        for sequence in mine:
            sequence.rollback(1)
        run.executor = plain
        # INT8 codes of the new token are written twice, from hidden states that differ in the last bits.
        tolerance = 1e-4 if kv_bits is None else 5e-2
        torch.testing.assert_close(run.step(*args).flip(0), logits, atol=tolerance, rtol=0)
        run.executor = executor
    assert not executor.why_not and executor.replays == 8 and 2 <= executor.captures < 8
    assert {size for size, *_ in executor.buckets} <= {2, 4}
    for s in sequences:
        s.free()
    assert run.pool.used_pages == 0
    with pytest.raises(Unsupported, match="the model is on cpu"):
        Graphs(model)
    with pytest.raises(Unsupported, match="captured"):
        Graphs(tiny("bloom"), device="cpu")


def test_tables_of_two_widths_keep_their_graphs(gpu, monkeypatch):
    model, run = running()
    monkeypatch.setattr(graphs, "BLOCKS", 4)
    executor = captured(model, run)
    run.pool.reserve(100)
    short, long = run.sequence(), run.sequence()
    run.prefill([ids(1, 3)[0], ids(1, 21)[0]], [torch.arange(3), torch.arange(21)], [short, long])
    executor.captures = 0
    monkeypatch.setattr(backend.Step, "host_rows", lambda *_: None)
    for _ in range(3):
        for s in (short, long):
            run.step(ids(1, 1)[0], torch.tensor([s.length]), [s], [1], torch.arange(1))
    assert executor.captures == 2 and executor.replays == 6
    for s in (short, long):
        s.free()


def test_what_cannot_be_captured_runs_as_modules(gpu):
    """A forward that looks at what tensors hold; a pool without a page for rows that fill up."""
    model, run = running("llama")
    plain = tiny("llama")
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out * out.isfinite().all().item()
    )
    executor = captured(model, run)
    out = model.generate(ids(2, 9), max_new_tokens=6, do_sample=False)
    assert torch.equal(out, plain.generate(ids(2, 9), max_new_tokens=6, do_sample=False))
    assert executor.replays == 0 and "not permitted" in executor.why_not
    assert "cannot be captured" in mixin.explain(model)["why"]
    model, _ = running()
    run = runner.Runner(model, page_tokens=4, budget_pages=6)
    executor = captured(model, run)
    sequences = [run.sequence() for _ in range(3)]
    rows = [ids(1, 4, seed=b)[0] for b in range(3)]
    run.prefill(rows, [torch.arange(4)] * 3, sequences)
    tokens, positions = torch.tensor([7, 8, 9]), torch.full((3,), 4)
    got = run.step(tokens, positions, sequences, [1] * 3, torch.arange(3))
    for row, token, logits in zip(rows, tokens, got, strict=True):
        want = dense(model, torch.cat([row, token[None]]))[-1]
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)
    assert executor.replays == 0 and run.pool.free_pages == 0


def test_a_failed_capture_is_no_fallback_under_strict_and_no_memory_is_not_hidden(gpu, monkeypatch):
    def fails(error):
        def capture(run):
            raise error

        model, run = running()
        captured(model, run, capture)
        return lambda: model.generate(ids(1, 5), max_new_tokens=3, do_sample=False)

    with pytest.raises(torch.OutOfMemoryError):
        fails(torch.OutOfMemoryError("no memory"))()
    calls = fails(RuntimeError("not permitted"))
    assert calls().shape == (1, 8)
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    model, run = running()
    captured(model, run, lambda run: (_ for _ in ()).throw(RuntimeError("not permitted")))
    with pytest.raises(PatchError, match="HFACCEL_STRICT=1: decode cannot be captured: not permitted"):
        model.generate(ids(1, 5), max_new_tokens=3, do_sample=False)


def test_as_many_tokens_as_sequences_need_not_be_one_each(gpu):
    """Two tokens for one sequence and none for the other are no decode step."""
    model, run = running()
    executor = captured(model, run)
    rows = [ids(1, 5, seed=1)[0], ids(1, 7, seed=2)[0]]
    sequences = [run.sequence() for _ in rows]
    run.prefill(rows, [torch.arange(5), torch.arange(7)], sequences)
    extra = ids(1, 2, seed=3)[0]
    got = run.step(extra, torch.arange(5, 7), sequences, [2, 0], torch.arange(2))
    torch.testing.assert_close(got, dense(model, torch.cat([rows[0], extra]))[5:], atol=1e-4, rtol=0)
    with pytest.raises(PatchError, match="at least one token"):
        run.step(extra[:0], extra[:0], sequences, [0, 0], torch.arange(0))
    assert executor.replays == 0 and [s.length for s in sequences] == [7, 7]


def gathered(y, x, adapters, a, b, scale, rank):
    """`lora_add` as a GPU kernel sees it: nothing depends on what the tensors hold."""
    slot = adapters.clamp_min(0).long()
    used = (torch.arange(a.shape[1]) < rank[slot, None]) & (adapters >= 0)[:, None]
    narrow = torch.einsum("tk,trk->tr", x, a[slot]) * used * scale[slot, None]
    y += torch.einsum("tr,trn->tn", narrow, b[slot])


def test_one_graph_serves_any_adapters(gpu, monkeypatch, tmp_path):
    """Slots are inputs of a graph: it is replayed with others, and with other adapters in the same slots.
    Tables made anew are captured anew; rows that fill a bucket up have none."""
    model, run = running("TL")
    peft = [adapter(tiny("TL"), tmp_path / str(n), seed=n, targets=LINEARS, r=4) for n in range(3)]
    peft.append(adapter(tiny("TL"), tmp_path / "3", seed=3, targets=LINEARS, r=12))
    known = [read_adapter(str(n), tmp_path / str(n), model) for n in range(4)]
    slots = AdapterSlots(model, slots=2)
    slots.make_room(known[0])
    monkeypatch.setattr(modules, "lora_add", gathered)
    run.refresh()
    run.executor = executor = Graphs(model, slots, capture=stub, device="cpu")
    rows = [ids(1, 3 + b, seed=b)[0] for b in range(3)]
    held = run.sequence()
    held.extend(1)  # a pool without users gives its storage back
    run.pool.reserve(20)

    def decode(whose):
        """The last token of each row as a step of its own, after a prefill of the others."""
        for n in {n for n in whose if n is not None}:
            assert slots.acquire(known[n])
        adapters = [-1 if n is None else slots.slot(known[n]) for n in whose]
        sequences, counts = [run.sequence() for _ in rows], [len(row) - 1 for row in rows]
        starts = torch.cat([torch.arange(count) for count in counts])
        first = torch.cat([row[:-1] for row in rows])
        run.step(first, starts, sequences, counts, torch.arange(1), adapters=adapters)
        last, ends = torch.stack([row[-1] for row in rows]), torch.tensor(counts)
        found = run.step(last, ends, sequences, [1] * 3, torch.arange(3), adapters=adapters)
        for row, n, got in zip(rows, whose, found, strict=True):
            want = dense(model if n is None else peft[n], row)[-1]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        for sequence in sequences:
            sequence.free()
        for n in {n for n in whose if n is not None}:
            slots.release(known[n])

    for whose in ([0, None, 1], [1, 1, 0], [None, 2, 1], [None, None, None]):
        decode(whose)
    assert not executor.why_not and executor.replays == 4 and executor.captures == 2  # with adapters, without
    slots.make_room(known[3])
    decode([3, None, 2])
    assert executor.replays == 5 and executor.captures == 3
    held.free()
    assert not any(module._forward_hooks for module in model.modules())
