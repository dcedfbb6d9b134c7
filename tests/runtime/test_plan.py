"""The records themselves: what is built, printed, checked, and where barriers stand."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import tiny
from hfaccel.runtime import Unsupported
from hfaccel.runtime.plan import ASKED, TOKENS, Buffer, Matrix, Plan, View
from hfaccel.runtime.plan_attention import alibi_slopes
from hfaccel.runtime.plan_build import build
from hfaccel.runtime.plan_ops import (
    Act,
    Add,
    Attend,
    CacheWrite,
    Embed,
    Gather,
    Join,
    Matmul,
    Norm,
    Quant,
    Rope,
    Scale,
)
from hfaccel_kernels.layouts import TOKEN_K, Layout
from plans import FAMILIES, quantize


@pytest.mark.parametrize("family", FAMILIES)
def test_points_at_the_models_own_tensors(family):
    """No copies: every weight of the model is pointed at in place, or (rope's frequencies) computed."""
    model = quantize(tiny.tiny(family), Layout(4, 32, False))
    plan = build(model)
    mine = {t.data_ptr() for op in plan.ops for t in op.tensors()}
    buffers = [b for name, b in model.named_buffers() if "scale" in name or "zero" in name]
    theirs = {t.data_ptr(): t for t in (*model.parameters(), *buffers) if t.numel() > 1}
    missing = [tuple(t.shape) for at, t in theirs.items() if at not in mine]
    # the right half of a fused gate and up is reached through its left half
    assert not missing
    weights = sum(t.numel() * t.element_size() for t in theirs.values())
    assert plan.weight_bytes() <= weights * 1.01


def test_five_barriers_a_layer_on_decode_steps():
    few, many = (build(tiny.tiny("llama", num_hidden_layers=n)) for n in (2, 6))
    assert sum(many.sync(True, True)) - sum(few.sync(True, True)) == 4 * 5
    assert sum(few.sync(False, False)) > sum(few.sync(True, True))


def barriers(family, **modes):
    plan = build(tiny.tiny(family))
    flags = plan.sync(**modes)
    return plan, {op.name: flag for op, flag in zip(plan.ops, flags, strict=True)}, flags


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_barrier_between_every_product_and_its_reader(family, replicated, fused):
    """Whoever reads rows of a product, or a product of rows, waits for the other threads."""
    plan, _, flags = barriers(family, replicated=replicated, fused=fused)
    written: dict[int, tuple[int, str]] = {}
    for index, op in enumerate(plan.ops):
        if fused and isinstance(op, CacheWrite):
            continue
        for number, how, read, _, _ in op.accesses(plan):
            if read and number in written:
                at, by = written[number]
                crossing = {how, by} == {"rows", "cols"} and not (replicated and by == "rows")
                if crossing or (by == "items" and how != "items"):
                    assert any(flags[at + 1 : index + 1]), (op.name, plan.buffers[number].name)
        for number, how, _, write, _ in op.accesses(plan):
            if write:
                written[number] = (index, how)


def test_activation_follows_its_product_without_a_barrier():
    plan, _, flags = barriers("llama", replicated=False, fused=False)
    acts = [flags[i] for i, op in enumerate(plan.ops) if isinstance(op, Act)]
    assert acts == [False, False]


def test_fused_gate_and_up_are_two_views_where_blocks_allow():
    aligned = build(quantize(tiny.tiny("phi3"), Layout(4, 32)))  # 112 rows: 7 blocks
    assert [len(op.parts) for op in aligned.ops if isinstance(op, Matmul) and "gate_up" in op.name] == [2, 2]
    cut = build(quantize(tiny.tiny("phi3", intermediate_size=100), Layout(4, 32)))
    assert [len(op.parts) for op in cut.ops if isinstance(op, Matmul) and "gate_up" in op.name] == [1, 1]


def test_shared_input_is_quantized_once_for_each_kind_of_chunk():
    model = quantize(tiny.tiny("llama"), Layout(4, 32))
    assert sum(isinstance(op, Quant) for op in build(model).ops) == 2 * 4 + 1
    attention = model.model.layers[0].self_attn
    mixed = quantize(tiny.tiny("llama"), Layout(8, act_bits=16)).model.layers[0].self_attn
    attention.v_proj = mixed.v_proj
    plan = build(model)
    assert sum(isinstance(op, Quant) for op in plan.ops) == 2 * 4 + 2
    names = [op.name for op in plan.ops if isinstance(op, Matmul) and ".0.self_attn" in op.name]
    assert [name.rpartition(".")[2] for name in names] == ["q_proj+k_proj", "v_proj", "o_proj"]


def test_one_module_under_two_names_is_read_twice():
    model = tiny.tiny("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj = first.up_proj
    reads = [m.weight for op in build(model).ops if isinstance(op, Matmul) for m in op.parts]
    assert sum(weight is first.up_proj.weight for weight in reads) == 2
    assert sum(weight is first.gate_proj.weight for weight in reads) == 1


def test_only_asked_rows_go_through_the_last_layers_mlp():
    plan = build(tiny.tiny("llama"))
    first = next(i for i, op in enumerate(plan.ops) if isinstance(op, Gather))
    after = plan.ops[first:]
    assert any(isinstance(op, Matmul) and "down_proj" in op.name for op in after)
    assert {plan.buffers[op.outs[0]].rows for op in after if isinstance(op, Matmul)} == {ASKED}
    assert not any(isinstance(op, Attend) for op in after)


def test_prints_a_line_a_record():
    plan = build(quantize(tiny.tiny("qwen3"), Layout(4, 64, False, "fp16")))
    head, columns, *lines = str(plan).splitlines()
    assert f"{len(plan.ops)} records" in head and "barriers" in head and "what" in columns
    assert len(lines) == len(plan.ops)
    assert any("int4g64z" in line and "q_proj+k_proj+v_proj" in line for line in lines)
    kb = [float(found[1]) for line in lines if (found := re.search(r" (\d+\.\d)  ", line))]
    assert abs(sum(kb) * 1e3 - plan.weight_bytes()) < 60 * len(lines)


def plan_of(*ops, buffers):
    plan = Plan(list(ops), buffers, vocab=8, out_width=8, dtype=torch.float32)
    plan.check()
    return plan


A, B = Buffer("a", 8, TOKENS), Buffer("b", 6, TOKENS)


@pytest.mark.parametrize(
    "op",
    [
        Add(name="x", x=0, y=1),
        Norm(name="x", x=View(0, 4, 1, 8, 8), out=0, eps=1e-5),
        Norm(name="x", x=View(0, 0, 1, 8, 8), out=0, eps=1e-5, weight=torch.ones(6)),
        Norm(name="x", x=View(0, 0, 1, 8, 8), out=0, eps=1e-5, weight=torch.ones(8, dtype=torch.float64)),
        Matmul(name="x", x=0, outs=(1,), parts=(Matrix(8, 8, torch.zeros(8, 8)),)),
        Matmul(name="x", x=0, outs=(1,), parts=(Matrix(6, 8, torch.zeros(8, 6).T),)),
        Matmul(name="x", x=0, outs=(1,), parts=(Matrix(6, 8, torch.zeros(6, 8, dtype=torch.int8)),)),
        Quant(name="x", x=0, out=1),
        Gather(name="x", x=0, out=1),
        Act(name="x", gate=View(0, 0, 1, 8, 8), out=0, kind="mish"),
    ],
    ids=lambda op: type(op).__name__,
)
def test_records_that_do_not_fit_their_buffers_are_refused(op):
    with pytest.raises(Unsupported, match="x \\(|contiguous|int8"):
        plan_of(op, buffers=[A, B])


@pytest.mark.parametrize("family, owner, name", [
    ("llama", "model.rotary_emb", "inv_freq"),
    ("gpt2", "transformer.wpe", "weight"),
    ("llama", "model.norm", "weight"),
    ("llama", "model.layers.0.mlp.up_proj", "weight"),
])  # fmt: skip
def test_a_tensor_on_another_device_is_refused(family, owner, name):
    """Without an address of its own: a walk would read address 0, or take it for none."""
    model = tiny.tiny(family, num_hidden_layers=1)
    module = model.get_submodule(owner)
    tensor = getattr(module, name).detach().to("meta")
    setattr(module, name, nn.Parameter(tensor) if name in module._parameters else tensor)
    with pytest.raises(Unsupported, match="meta|on the CPU"):
        build(model)


@pytest.mark.parametrize(
    "op, why",
    [
        (Scale(name="x", x=0, out=0, scale=torch.ones(6)), "scale does not fit"),
        (Scale(name="x", x=0, out=0, scale=torch.ones(8, dtype=torch.bfloat16)), "scale of torch.bfloat16"),
        (Rope(name="x", out=0, inv_freq=torch.ones(3)), "inv_freq"),
        (
            Embed(name="x", out=0, table=Matrix(8, 8, torch.ones(8, 8)), positions=torch.ones(4, 8)),
            "position",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_vectors_and_tables_are_checked(op, why):
    with pytest.raises(Unsupported, match=why):
        plan_of(op, buffers=[A, B])


def test_a_row_whose_int8_dot_no_int32_holds_is_refused():
    layout = Layout(8, act="token")
    for k, too_long in ((TOKEN_K, False), (TOKEN_K + 1, True)):
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in layout.shapes(16, k).values()]
        matrix = Matrix(16, k, tensors[0], layout, tensors[1])
        if not too_long:
            matrix.check()
            continue
        with pytest.raises(Unsupported, match=f"{k} inputs: one int32"):
            matrix.check()


def test_attention_is_checked():
    def attend(heads, kv_heads, size, **more):
        q = View(0, 0, heads, size, size)
        k = View(0, 0, kv_heads, size, size)
        one = Attend(name="x", q=q, k=k, v=k, out=1, scale=1.0, **more)
        width = heads * size
        return plan_of(one, buffers=[Buffer("q", width, TOKENS), Buffer("o", width, TOKENS)])

    assert attend(6, 2, 16).layers()
    for heads, kv_heads, size in ((6, 4, 16), (128, 1, 16), (2, 2, 1024)):
        with pytest.raises(Unsupported):
            attend(heads, kv_heads, size)
    with pytest.raises(Unsupported, match="sinks"):
        attend(6, 2, 16, sinks=torch.zeros(5))


@pytest.mark.parametrize("heads", [1, 3, 4, 12, 16, 71])
def test_alibi_slopes_are_transformers_own(heads):
    want = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads), want, rtol=1e-6, atol=0)


def test_join_belongs_to_its_attention():
    view = View(0, 0, 2, 4, 4)
    attend = Attend(name="x", q=view, k=view, v=view, out=0, scale=1.0)
    with pytest.raises(Unsupported):
        plan_of(Join(name="x", x=1, out=0, attend=attend), buffers=[A, Buffer("c", 8, TOKENS)])


def _class(model):
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Other", (type(mlp),), {"forward": lambda self, x: -x})


def _all_modules(model):
    return nn.modules.module.register_module_forward_hook(lambda module, args, out: None)


def _compiled_top(model):
    model.forward = torch.compile(model.forward, backend="eager")


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda m: setattr(m, "forward", lambda *a, **k: None), "the forward of LlamaForCausalLM"),
        (lambda m: setattr(m.model.layers[1].mlp, "forward", torch.neg), "the forward of model.layers.1.mlp"),
        (lambda m: m.register_forward_hook(lambda *a: None), "forward hooks on LlamaForCausalLM"),
        (_all_modules, "forward hooks on every module"),
        (_class, "model.layers.0.mlp is a Other with a forward of its own"),
        (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.ReLU()), "act_fn is a ReLU"),
        (
            lambda m: register_parametrization(m.model.norm, "weight", nn.Identity()),
            "model.norm: its tensors are computed",
        ),
    ],
)
def test_code_that_is_not_the_librarys_is_refused(change, why):
    model = tiny.tiny("llama")
    handle = change(model)
    try:
        with pytest.raises(Unsupported, match=re.escape(why)):
            build(model)
    finally:
        if change is _all_modules:
            handle.remove()


def test_a_class_whose_forward_was_exchanged_is_refused(monkeypatch):
    model = tiny.tiny("llama")
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: -x)
    with pytest.raises(Unsupported, match="with a forward of its own"):
        build(model)


def test_compiled_forwards_and_hooks_that_only_capture_are_no_obstacle():
    model = tiny.tiny("llama")
    model(tiny.ids(1, 3), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())  # transformers leaves them there
    _compiled_top(model)
    build(model)
