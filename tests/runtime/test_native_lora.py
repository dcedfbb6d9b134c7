"""Adapters in the plan: every row equals PEFT's own model with that adapter, whatever stands beside it."""

import pytest
import torch

import hfaccel
from hfaccel.errors import PatchError
from hfaccel.quant.linear import ScaledLinear
from hfaccel.runtime.native import Native
from hfaccel.runtime.plan_build import build
from hfaccel.runtime.plan_lora import LoraExpand, LoraShrink
from hfaccel.runtime.plan_reference import Reference
from hfaccel_kernels import native
from hfaccel_kernels.layouts import Layout
from lora_folders import LINEARS, QV, adapter, logits_of, mixed_adapters, one_step, slots_of
from plans import close, quantize
from tiny import ids, tiny

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")

FUSED = {"phi3": ["qkv_proj", "gate_up_proj"], "gpt2": ["c_attn", "c_proj"], "gpt_neox": ["query_key_value"]}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    model, at = tiny("llama"), tmp_path_factory.mktemp("adapters")
    return model, mixed_adapters(model, at), [at / name for name in "abc"]


@pytest.mark.parametrize("kind", [Native, Reference])
def test_each_row_equals_a_solo_run(mixed, kind):
    model, peft, folders = mixed
    slots, order = slots_of(model, *folders)
    executor = kind(model, lora=slots)
    whose = [2, None, 0, 1, 0, None, 1, 2]
    rows = [ids(1, 3 + n, seed=n)[0] for n in range(8)]
    found = one_step(model, executor, rows, [-1 if n is None else order[n] for n in whose])
    for row, n, got in zip(rows, whose, found, strict=True):
        close(got, logits_of(model if n is None else peft[n], row))


def test_order_and_neighbours_change_no_bit(mixed):
    model, _, folders = mixed
    slots, order = slots_of(model, *folders)
    executor = Native(model, lora=slots)
    rows = [ids(1, n, seed=n)[0] for n in (1, 1, 7, 12)]
    adapters = [order[1], -1, order[2], order[1]]
    together = one_step(model, executor, rows, adapters)
    turned = one_step(model, executor, rows[::-1], adapters[::-1])[::-1]
    for row, slot, one, other in zip(rows, adapters, together, turned, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, one_step(model, executor, [row], [slot])[0])
    plain = Native(model)
    assert torch.equal(together[1], one_step(model, plain, [rows[1]], None)[0])
    assert torch.equal(one_step(model, executor, rows, None)[1], together[1])


@pytest.mark.parametrize("family", FUSED)
def test_fused_and_transposed_layers(family, tmp_path):
    model = tiny(family)
    peft = adapter(model, tmp_path / "x", targets=FUSED[family], fan_in_fan_out=family == "gpt2")
    slots, order = slots_of(model, tmp_path / "x")
    row = ids(1, 9)[0]
    found = one_step(model, Native(model, lora=slots), [row, row], [order[0], -1])
    close(found[0], logits_of(peft, row))
    close(found[1], logits_of(model, row))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_on_the_head_and_on_asked_rows(family, tmp_path):
    model = tiny(family)
    peft = adapter(model, tmp_path / "x", targets=["lm_head", "down_proj"], r=3)
    slots, order = slots_of(model, tmp_path / "x")
    rows = [ids(1, n, seed=n)[0] for n in (5, 6, 4)]
    adapters = [-1, order[0], -1]
    found = one_step(model, Native(model, lora=slots), rows, adapters, asked=[14, 10, 4, 7])
    close(found[1], logits_of(peft, rows[1])[5])
    close(found[3], logits_of(peft, rows[1])[2])
    close(found[0], logits_of(model, rows[2])[3])
    close(found[2], logits_of(model, rows[0])[4])


@pytest.mark.parametrize("layout", [Layout(8, -1, True), Layout(4, 32, False)])
def test_over_packed_weights(layout, tmp_path):
    model = quantize(tiny("llama"), layout)
    adapter(tiny("llama"), tmp_path / "x", targets=LINEARS, r=6)
    slots, order = slots_of(model, tmp_path / "x")
    row = ids(1, 8)[0]
    steps = [
        one_step(model, kind(model, lora=slots), [row, row], [-1, order[0]]) for kind in (Native, Reference)
    ]
    assert torch.equal(steps[0][0], one_step(model, Native(model), [row], None)[0])
    for got, want in zip(*steps, strict=True):
        assert (got - want).abs().mean() < 2e-3 * want.abs().mean()  # a rounding may fall the other way
    assert (steps[0][1] - steps[0][0]).abs().mean() > 0.1 * steps[0][0].abs().mean()


@pytest.mark.parametrize("recipe", ["int8", "int4", "nf4", "w8a8-nosmooth"])
def test_over_patched_models_as_peft_has_it(recipe, tmp_path, spill):
    """PEFT's layers over the packed ones are the oracle; ranks and sizes that 16 does not divide."""
    model = hfaccel.patch(tiny("TL", intermediate_size=104), recipe, progress=False)
    peft = adapter(model, tmp_path / "x", targets=LINEARS, r=5)
    slots, order = slots_of(model, tmp_path / "x")
    row = ids(1, 9)[0]
    found = one_step(model, Native(model, lora=slots), [row, row], [order[0], -1])
    bare, want = logits_of(model, row), logits_of(peft, row)
    for got, wanted in ((found[0], want), (found[1], bare)):
        assert (got - wanted).abs().mean() < 5e-3 * wanted.abs().mean()  # a rounding may fall the other way
    assert (want - bare).abs().mean() > 0.1 * bare.abs().mean()


@torch.no_grad()
def test_inputs_are_scaled_for_the_codes_alone(tmp_path):
    """An adapter beside a ScaledLinear takes the module's own input."""
    model = quantize(tiny("llama"), Layout(8, -1, True))
    adapter(tiny("llama"), tmp_path / "x", targets=QV, r=3)
    scale = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.5
    for layer in model.model.layers:
        old = layer.self_attn.q_proj
        layer.self_attn.q_proj = ScaledLinear(64, 64, old.layout, old.packed, input_scale=scale)
    slots, order = slots_of(model, tmp_path / "x")
    row = ids(1, 8)[0]
    found = one_step(model, Native(model, lora=slots), [row, row], [order[0], -1])
    bare, hooks = logits_of(model, row), []
    for name, table in slots.tables.items():

        def add(module, args, out, table=table):
            slot = order[0]
            return out + table.scale[slot] * (args[0] @ table.a[slot].T @ table.b[slot])

        hooks.append(model.get_submodule(name).register_forward_hook(add))
    want = logits_of(model, row)
    for got, wanted in ((found[0], want), (found[1], bare)):
        assert (got - wanted).abs().mean() < 5e-3 * wanted.abs().mean()
    assert (want - bare).abs().mean() > 0.05 * bare.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_with_an_adapter_leaves_the_embedding_and_the_others(tmp_path, dtype):
    """CASES L1: no look-up changes, and rows without the adapter keep every bit, beside it or without it."""
    model = tiny("llama", tie_word_embeddings=True)
    peft = adapter(model, tmp_path / "x", targets=["lm_head"], r=3)
    row = ids(1, 7)[0]
    want = logits_of(peft, row)
    model = model.to(dtype)
    slots, order = slots_of(model, tmp_path / "x")
    executor = Native(model, lora=slots)
    found = one_step(model, executor, [row, row], [order[0], -1])
    plain = one_step(model, Native(model), [row], None)[0]
    assert torch.equal(found[1], plain) and torch.equal(one_step(model, executor, [row], None)[0], plain)
    close(found[0].float(), want, 1e-5 if dtype is torch.float32 else 0.05)


def test_bf16_tables(tmp_path):
    model = tiny("llama").bfloat16()
    peft = adapter(tiny("llama"), tmp_path / "x", targets=LINEARS, r=5)
    slots, order = slots_of(model, tmp_path / "x")
    assert {t.dtype for table in slots.tables.values() for t in (table.a, table.b)} == {torch.bfloat16}
    row = ids(1, 8)[0]
    found = one_step(model, Native(model, lora=slots), [row], [order[0]])[0].float()
    want = logits_of(peft, row)
    assert (found - want).abs().mean() < 0.03 * want.abs().mean()
    reference = one_step(model, Reference(model, lora=slots), [row], [order[0]])[0].float()
    assert (found - reference).abs().max() <= 0.02 * reference.abs().max()


def test_records_and_barriers(mixed):
    model, _, folders = mixed
    slots, _ = slots_of(model, folders[1])
    plan, bare = build(model, lora=slots), build(model)
    layers = model.config.num_hidden_layers
    kinds = [type(op) for op in plan.ops]
    assert kinds.count(LoraShrink) == kinds.count(LoraExpand) == 7 * layers
    assert sum(plan.sync(True, True)) == sum(bare.sync(True, True))  # decode: not a barrier more
    assert plan.weight_bytes() == bare.weight_bytes()
    assert "lora_A" in str(plan)


def test_a_slot_that_no_table_has_is_refused(mixed):
    model, _, folders = mixed
    slots, _ = slots_of(model, folders[0], count=2)
    executor = Native(model, lora=slots)
    for wrong in (2, -2):
        with pytest.raises(PatchError, match="slot"):
            one_step(model, executor, [ids(1, 3)[0]] * 2, [0, wrong])
