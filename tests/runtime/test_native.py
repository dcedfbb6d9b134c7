"""The C++ executor: equal to transformers and the reference, to itself bit for bit however steps are cut."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import tiny
from hfaccel.errors import PatchError
from hfaccel.runtime import Unsupported
from hfaccel.runtime.native import Native, executor
from hfaccel.runtime.plan_build import build
from hfaccel.runtime.plan_reference import Reference
from hfaccel.runtime.runner import Runner
from hfaccel_kernels import native
from hfaccel_kernels.layouts import Layout
from plans import FAMILIES, Steps, close, logits, quantize, record_errors

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")

INT8 = Layout(8)
INT4 = Layout(4, 64, False, "fp16")
WIDE = {  # so that a product has pieces
    "llama": {"hidden_size": 256, "intermediate_size": 515, "head_dim": 64, "num_attention_heads": 4},
    "gpt2": {"n_embd": 256, "n_inner": 515, "n_head": 4},
}
ODD = Layout(4, 40, False, "fp16", 16)  # groups that no chunk fits, 16-bit activations


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_in_fp32(family):
    model, ids = tiny.tiny(family), tiny.ids(1, 45)[0]
    close(Steps(model, executor(model)).run(ids)[0], logits(model, ids))


@pytest.mark.parametrize("layout", [None, INT4, ODD], ids=["fp32", "int4", "odd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_record_equals_the_reference(family, layout):
    model, ids = tiny.tiny(family, num_hidden_layers=2), tiny.ids(1, 19)[0]
    if layout is not None:
        quantize(model, layout)
    errors = record_errors(model, ids)
    assert {"Matmul", "Attend", "Act", "Norm", "Add"} <= errors.keys()
    # 1e-5: sums of some hundred fp32 products in another order; cos and sin of large angles differ by an ulp
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "phi3"])
def test_packed_models_stay_near_the_reference(family):
    # Rounding of activations turns an ulp into a code, so that whole models agree only as well as int8 does.
    model, ids = quantize(tiny.tiny(family), INT8, embedding=INT8), tiny.ids(1, 33)[0]
    got, want = Steps(model, executor(model)).run(ids)[0], Steps(model, Reference(model)).run(ids)[0]
    close(got, want, 2e-2)
    assert (got - want).abs().mean() < 2e-3 * want.abs().mean()


def variants(family):
    yield tiny.tiny(family), {}
    yield quantize(tiny.tiny(family), INT4), {"kv_bits": 8}
    yield quantize(tiny.tiny(family).to(torch.bfloat16), INT8), {}


@pytest.mark.parametrize("family", FAMILIES)
def test_cuts_neighbours_and_threads_change_no_bit(family):
    """Prefill cut at random borders, decode, rows beside it, 1 to 3 threads: the bits of one step alone."""
    rows = [tiny.ids(1, n, seed=n)[0] for n in (90, 7, 64)]
    generator = torch.Generator().manual_seed(5)
    for model, options in variants(family):
        steps = Steps(model, executor(model), **options)
        torch.set_num_threads(1)
        whole = [steps.run(ids)[0] for ids in rows]
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            cuts = sorted(torch.randint(1, 88, (3,), generator=generator).tolist())
            cuts = sorted({*cuts, cuts[0] + 1, cuts[1] + 1, 88, 89})  # some steps are decode steps
            alone = steps.run(rows[0], cuts=cuts)[0]
            assert torch.equal(alone, whole[0]), (threads, cuts)
            for got, want in zip(steps.run(*rows, cuts=cuts), whole, strict=True):
                assert torch.equal(got, want), (threads, cuts)


@pytest.mark.parametrize("hidden,mlp", [(70, 515), (48, 33), (200, 130)])
@pytest.mark.parametrize("layout", [None, INT8, INT4, ODD, Layout(3, 32), Layout(2, 16, False)], ids=str)
def test_odd_widths(hidden, mlp, layout):
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "head_dim": 16, "num_attention_heads": 2}
    model = tiny.tiny("llama", **sizes, num_key_value_heads=1, num_hidden_layers=1)
    if layout is not None:
        quantize(model, layout, embedding=layout)
    errors = record_errors(model, tiny.ids(1, 5)[0])
    assert max(errors.values()) < 1e-5, errors
    ids = tiny.ids(1, 30)[0]
    steps = Steps(model, executor(model))
    assert torch.equal(steps.run(ids)[0], steps.run(ids, cuts=[1, 2, 7, 8, 20])[0])


@pytest.mark.parametrize("layout", [None, INT4], ids=["bf16", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_products_in_pieces_have_the_bits_of_one_thread(family, layout):
    """From 16 tokens on; more threads than some products have pieces, too."""
    model = tiny.tiny(family, **WIDE[family]).to(torch.bfloat16)
    if layout is not None:
        quantize(model, layout)
    steps = Steps(model, executor(model))
    for tokens in (15, 16, 61):
        ids = tiny.ids(1, tokens)[0]
        torch.set_num_threads(1)
        whole = steps.run(ids)[0]
        for threads in (2, 3, 7, 40):
            torch.set_num_threads(threads)
            assert torch.equal(steps.run(ids)[0], whole), (tokens, threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_half_models_are_nearer_to_fp32_than_transformers_is(family, dtype):
    model, ids = tiny.tiny(family).to(dtype), tiny.ids(1, 40)[0]
    exact = logits(copy.deepcopy(model).float(), ids)
    got = Steps(model, executor(model)).run(ids)[0]
    assert got.dtype == dtype
    theirs = (logits(model, ids).float() - exact).abs().mean()
    assert (got.float() - exact).abs().mean() < theirs


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "phi"])
def test_hidden_states(family):
    model, ids = tiny.tiny(family), tiny.ids(1, 20)[0]
    with torch.no_grad():
        want = model.base_model(ids[None]).last_hidden_state[0]
    close(Steps(model, executor(model)).run(ids, hidden=True)[0], want)


def test_asked_rows_in_any_order_and_none():
    model, ids = tiny.tiny("llama"), tiny.ids(1, 12)[0]
    steps = Steps(model, executor(model))
    want = steps.run(ids)[0]
    sequence = steps.runner.sequence()
    rows = torch.tensor([11, 0, 5, 5])
    got = steps.runner.step(ids, torch.arange(12), [sequence], [12], rows)
    assert torch.equal(got, want[rows])
    sequence.rollback(4)
    none = steps.runner.step(ids[8:], torch.arange(8, 12), [sequence], [4], torch.zeros(0, dtype=torch.long))
    assert none.shape == (0, want.shape[1])
    sequence.free()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_types(rope):
    model = tiny.tiny("llama", rope_parameters={"rope_theta": 1e4, **rope})
    ids = tiny.ids(1, 80)[0]
    close(Steps(model, executor(model)).run(ids)[0], logits(model, ids))


def test_weights_changed_in_place_are_seen():
    model, ids = tiny.tiny("llama"), tiny.ids(1, 9)[0]
    steps = Steps(model, executor(model))
    before = steps.run(ids)[0]
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    after = steps.run(ids)[0]
    assert not torch.equal(before, after)
    close(after, logits(model, ids))


def test_replaced_tensors_stay_alive_while_the_plan_points_at_them():
    model, ids = tiny.tiny("llama"), tiny.ids(1, 9)[0]
    runner = Runner(model)
    steps = Steps(model, runner.refresh())
    before = steps.run(ids)[0]
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, float("nan"))
    reused = [torch.full_like(p, float("nan")) for p in model.parameters() for _ in range(4)]
    assert torch.equal(steps.run(ids)[0], before)
    assert runner.refresh() is not steps.runner.executor
    assert Steps(model, runner.executor).run(ids)[0].isnan().all()
    del reused


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_every_record_counts(family):
    """A plan less any one record gives other logits."""
    model, ids = tiny.tiny(family), tiny.ids(1, 40)[0]
    plan = build(model)
    want = Steps(model, Native(model, plan)).run(ids)[0]
    for index, op in enumerate(plan.ops):
        ops = plan.ops[:index] + plan.ops[index + 1 :]
        less = Native(model, plan.with_ops(ops))
        less.replicate = 0
        less._arena = torch.full((1 << 22,), 255, dtype=torch.uint8)  # NaN, so that nothing is left to find
        less._step.arena, less._step.arena_bytes = less._arena.data_ptr(), less._arena.numel()
        try:
            got = Steps(model, less).run(ids)[0]
        except PatchError:  # pages without the record that reads them
            assert type(op).__name__ == "Attend"
            continue
        assert not torch.equal(got, want), f"{index} {op.name}"


def test_timings_name_every_record():
    model, ids = tiny.tiny("llama"), tiny.ids(1, 9)[0]
    native_executor = executor(model)
    native_executor.profile()
    Steps(model, native_executor).run(ids)
    timings = native_executor.timings()
    assert [t.op for t in timings] == native_executor.plan.ops
    assert all(t.work_ns > 0 for t in timings)


def bad_step(change):
    model = tiny.tiny("opt")
    steps = Steps(model, executor(model))
    sequence = steps.runner.sequence()
    sequence.extend(3)
    inputs = {
        "ids": torch.tensor([5, 6, 7]),
        "positions": torch.arange(3),
        "block_tables": torch.tensor([sequence.pages], dtype=torch.int32),
        "q_starts": torch.tensor([0, 3], dtype=torch.int32),
        "lengths": torch.tensor([3], dtype=torch.int32),
        "rows": torch.tensor([2]),
    }
    inputs |= change
    return steps.runner.executor.step(steps.runner.pool, *inputs.values())


@pytest.mark.parametrize(
    "change,words",
    [
        ({"ids": torch.tensor([5, 256, 7])}, "vocabulary of 256"),
        ({"ids": torch.tensor([5, -1, 7])}, "vocabulary"),
        ({"positions": torch.tensor([0, 1, 512])}, "table of 512"),
        ({"positions": torch.tensor([0, 1, -1])}, "negative"),
        ({"block_tables": torch.tensor([[-1]], dtype=torch.int32)}, "outside the pool"),
        ({"block_tables": torch.tensor([[1 << 20]], dtype=torch.int32)}, "outside the pool"),
        ({"lengths": torch.tensor([2], dtype=torch.int32)}, "shorter than its new tokens"),
        ({"lengths": torch.tensor([1000], dtype=torch.int32)}, "outside the pool"),
        ({"q_starts": torch.tensor([0, 4], dtype=torch.int32)}, "contradict"),
        ({"q_starts": torch.tensor([1, 3], dtype=torch.int32)}, "contradict"),
        ({"rows": torch.tensor([3])}, "row outside"),
        ({"positions": torch.arange(2)}, "contradict"),
        (  # a second sequence, and no row of pages for it
            {
                "q_starts": torch.tensor([0, 2, 3], dtype=torch.int32),
                "lengths": torch.tensor([2, 1], dtype=torch.int32),
            },
            "contradict",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_steps_are_refused_before_anything_runs(change, words):
    assert bad_step({}).shape == (1, 256)
    with pytest.raises(PatchError, match=words):
        bad_step(change)


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def mlp(model):
    return model.model.layers[0].mlp


@pytest.mark.parametrize(
    "family,change,words",
    [
        ("llama", lambda m: mlp(m).register_forward_hook(lambda *a: None), "forward hooks on model.layers.0"),
        ("llama", lambda m: setattr(mlp(m), "up_proj", _Doubled(64, 112, bias=False)), "_Doubled"),
        ("llama", lambda m: setattr(mlp(m), "forward", lambda x: x), "forward of model.layers.0.mlp"),
        ("gpt2", lambda m: m.train(), "dropout"),
        ("llama", lambda m: mlp(m).to(torch.float64), "float64"),
        ("llama", lambda m: mlp(m).to("meta"), "not contiguous on the CPU"),
        ("bert", lambda m: None, "bert"),
        ("t5", lambda m: None, "t5"),
        ("falcon_alibi", lambda m: None, "alibi_scaled"),
        ("gpt_oss", lambda m: None, "swiglu_clamped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_say_why(family, change, words):
    model = tiny.tiny(family)
    change(model)
    with pytest.raises(Unsupported, match=words):
        executor(model)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_ropes_that_look_at_the_whole_input_are_refused(rope):
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    if rope == "longrope":
        factors = [1.0] * 8
        parameters |= {
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 64,
        }
    with pytest.raises(Unsupported, match=rope):
        executor(tiny.tiny("llama", rope_parameters=parameters))


@pytest.mark.slow  # compiles the library for each
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", native.supported_isas()[1:])
def test_other_instruction_sets_give_the_same_bits(name):
    """In a process of its own, since the choice is made once."""
    code = (
        "import hashlib, tiny, torch\n"
        "from plans import Steps, quantize\n"
        "from hfaccel.runtime.native import executor\n"
        "from hfaccel_kernels.layouts import Layout\n"
        "torch.set_num_threads(2)\n"
        "for bits in (8, 4):\n"
        "    model = quantize(tiny.tiny('gemma2'), Layout(bits, 32))\n"
        "    out = Steps(model, executor(model), kv_bits=8).run(tiny.ids(1, 40)[0], cuts=[30, 31])[0]\n"
        "    print(hashlib.sha256(out.numpy().tobytes()).hexdigest())\n"
    )

    def run(isa):
        environment = {**os.environ, "HFACCEL_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert run(name) == run("auto")


def test_a_failed_allocation_leaves_no_pointer_behind(monkeypatch):
    model, ids = tiny.tiny("llama"), tiny.ids(1, 400)[0]
    run = executor(model)
    steps = Steps(model, run)
    want = steps.run(ids[:4])[0]
    empty = torch.empty

    def refused(*args, **kwargs):
        if kwargs.get("dtype") is torch.uint8:
            raise RuntimeError("no memory")
        return empty(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", refused)
        with pytest.raises(RuntimeError, match="no memory"):
            steps.run(ids)
    assert (run._arena, run._step.arena, run._step.arena_bytes) == (None, None, 0)
    assert torch.equal(steps.run(ids[:4])[0], want)
