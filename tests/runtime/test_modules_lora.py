"""Adapters through the model's own modules: every row equals PEFT's own model, whatever stands beside it."""

import copy
import threading

import pytest
import torch

import lora_folders
from hfaccel.errors import PatchError
from hfaccel.generate import mixin
from hfaccel.runtime.modules import Modules
from hfaccel.runtime.runner import Runner
from hfaccel_kernels.layouts import Layout
from lora_folders import LINEARS, adapter, logits_of, mixed_adapters
from plans import close, quantize
from tiny import ids, tiny

FUSED = {
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value"],
    "bloom": ["query_key_value", "dense_4h_to_h"],
}


def slots_of(model, *folders, count=4):
    """As `lora_folders.slots_of`; the model attends over pages now."""
    mixin.install(model)
    return lora_folders.slots_of(model, *folders, count=count)


def run(model, executor, rows, adapters, **how):
    """As `lora_folders.one_step`; the step's hooks are gone."""
    out = lora_folders.one_step(model, executor, rows, adapters, page_tokens=4, **how)
    assert not any(module._forward_hooks for module in model.modules())
    return out


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    model, at = tiny("llama"), tmp_path_factory.mktemp("adapters")
    return model, mixed_adapters(model, at), [at / name for name in "abc"]


def test_each_row_equals_a_solo_run(mixed):
    model, peft, folders = mixed
    slots, order = slots_of(model, *folders)
    executor = Modules(model, slots)
    whose = [2, None, 0, 1, 0, None, 1, 2]
    rows = [ids(1, 3 + n, seed=n)[0] for n in range(8)]
    adapters = [-1 if n is None else order[n] for n in whose]
    found = run(model, executor, rows, adapters)
    bare = run(model, Modules(model), rows, None)
    for row, n, got, base in zip(rows, whose, found, bare, strict=True):
        close(got, logits_of(model if n is None else peft[n], row))
        assert torch.equal(got, base) == (n is None)
    turned = run(model, executor, rows[::-1], adapters[::-1])[::-1]
    for got, other in zip(found, turned, strict=True):
        close(other, got)
    assert all(torch.equal(a, b) for a, b in zip(run(model, executor, rows, None), bare, strict=True))


def test_prefill_then_decode(mixed):
    """The second step's keys and values are those that the adapter made in the first."""
    model, peft, folders = mixed
    slots, order = slots_of(model, *folders)
    runner = Runner(model, page_tokens=4)
    runner.executor = Modules(model, slots)
    rows, adapters = [ids(1, 5 + n, seed=n)[0] for n in range(4)], [order[1], -1, order[0], order[2]]
    sequences, counts = [runner.sequence() for _ in rows], [len(row) - 1 for row in rows]
    starts = torch.cat([torch.arange(count) for count in counts])
    runner.step(
        torch.cat([r[:-1] for r in rows]), starts, sequences, counts, torch.arange(0), adapters=adapters
    )
    last, ends = torch.stack([row[-1] for row in rows]), torch.tensor(counts)
    found = runner.step(last, ends, sequences, [1] * 4, torch.tensor([3, 1, 0, 2]), adapters=adapters)
    for b, model_of in enumerate((peft[1], model, peft[0], peft[2])):
        close(found[[3, 1, 0, 2].index(b)], logits_of(model_of, rows[b])[-1])


@pytest.mark.parametrize("family", FUSED)
def test_fused_and_transposed_layers(family, tmp_path):
    """Conv1D, fused projections, and a family that runs row by row."""
    model = tiny(family)
    peft = adapter(model, tmp_path / "x", targets=FUSED[family], fan_in_fan_out=family == "gpt2")
    slots, order = slots_of(model, tmp_path / "x")
    rows = [ids(1, 9, seed=n)[0] for n in range(3)]
    executor = Modules(model, slots)
    assert executor.mode == ("dense" if family == "bloom" else "packed")
    found = run(model, executor, rows, [order[0], -1, order[0]])
    for row, n, got in zip(rows, (True, False, True), found, strict=True):
        close(got, logits_of(peft if n else model, row))


def test_rows_whose_rope_looks_at_the_whole_input(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=8)
    peft = adapter(model, tmp_path / "x", targets=LINEARS)
    slots, order = slots_of(model, tmp_path / "x")
    executor = Modules(model, slots)
    assert executor.mode == "rows"
    rows = [ids(1, n, seed=n)[0] for n in (12, 5)]
    found = run(model, executor, rows, [-1, order[0]])
    for row, got, want in zip(rows, found, (model, peft), strict=True):
        close(got, logits_of(copy.deepcopy(want), row))


@pytest.mark.parametrize("keeps", [True, False])
def test_on_the_head_and_on_asked_rows(keeps, tmp_path):
    """The head sees the asked rows alone, in their order: as many as there are tokens, or fewer."""
    model = tiny("llama")
    peft = adapter(model, tmp_path / "x", targets=["lm_head", "down_proj"], r=3)
    slots, order = slots_of(model, tmp_path / "x")
    executor = Modules(model, slots)
    assert executor.keeps_logits
    executor.keeps_logits = keeps
    rows = [ids(1, n, seed=n)[0] for n in (5, 6, 4)]
    adapters, every = [-1, order[0], -1], [*range(14, -1, -1)]
    wants = [logits_of(peft if slot >= 0 else model, row) for row, slot in zip(rows, adapters, strict=True)]
    want = torch.cat(wants)
    for asked in ([14, 10, 4, 7], every, [6]):
        close(run(model, executor, rows, adapters, asked=asked), want[asked])
    inner = run(model, executor, rows, adapters, asked=[10], hidden=True)
    with torch.no_grad():
        close(inner[0], peft.base_model.model.model(rows[1][None]).last_hidden_state[0, 5])


@pytest.mark.parametrize("layout", [Layout(8, -1, True), Layout(4, 32, False)])
def test_over_packed_weights(layout, tmp_path):
    """PEFT's layers over the same packed weights say the same."""
    model = quantize(tiny("llama"), layout)
    peft = adapter(model, tmp_path / "x", targets=LINEARS, r=6)
    slots, order = slots_of(model, tmp_path / "x")
    row = ids(1, 8)[0]
    found = run(model, Modules(model, slots), [row, row], [-1, order[0]])
    assert torch.equal(found[0], run(model, Modules(model), [row, row], None)[0])
    want = logits_of(peft, row)
    # PEFT adds in x's dtype where we round once; a rounding of activations may fall the other way
    assert (found[1] - want).abs().mean() < 2e-3 * want.abs().mean()


def test_bf16(tmp_path):
    """As near to fp32 as PEFT's own bf16 model is."""
    model = tiny("llama").bfloat16()
    peft = adapter(tiny("llama"), tmp_path / "x", targets=LINEARS, r=5)
    slots, order = slots_of(model, tmp_path / "x")
    row = ids(1, 24)[0]
    found = run(model, Modules(model, slots), [row], [order[0]])[0].float()
    want, theirs = logits_of(peft, row), logits_of(copy.deepcopy(peft).bfloat16(), row).float()
    assert (found - want).abs().mean() < 1.1 * (theirs - want).abs().mean()


def test_refusals_and_errors_leave_no_hook(mixed, monkeypatch):
    model, _, folders = mixed
    slots, order = slots_of(model, folders[0], count=2)
    rows = [ids(1, 3)[0]] * 2
    for wrong in (2, 9):
        with pytest.raises(PatchError, match=f"slot {wrong}, there are 2"):
            run(model, Modules(model, slots), rows, [0, wrong])
    with pytest.raises(PatchError, match="without any"):
        run(model, Modules(model), rows, [0, -1])

    def breaks(*args, **kwargs):
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(model.model.layers[1].mlp, "forward", breaks)
        run(model, Modules(model, slots), rows, order * 2)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_layer_that_sees_other_tokens_is_refused(mixed, monkeypatch):
    """Routed tokens, say: whose they are cannot be known."""
    model, _, folders = mixed
    slots, order = slots_of(model, folders[2])
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: forward(x[:, :2]).repeat(1, 2, 1))
    with pytest.raises(PatchError, match="gate_proj sees 2 of 4 tokens"):
        run(model, Modules(model, slots), [ids(1, 4)[0]], order)


def test_a_forward_in_another_thread_has_no_adapters(mixed):
    model, _, folders = mixed
    slots, order = slots_of(model, folders[1])
    row, want, found = ids(1, 6)[0], logits_of(model, ids(1, 6)[0]), []

    def meanwhile(module, args):
        other = threading.Thread(target=lambda: found.append(logits_of(model, row)))
        handle.remove()
        other.start()
        other.join()

    handle = model.model.layers[0].register_forward_pre_hook(meanwhile)
    got = run(model, Modules(model, slots), [row], order)[0]
    assert torch.equal(found[0], want) and not torch.equal(got, want)
