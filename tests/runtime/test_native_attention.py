"""Attention in C++ on its own: what no family asks for against the reference, and how threads share a long
context."""

import ctypes

import pytest
import torch

import tiny
from hfaccel.runtime.native import Native, executor
from hfaccel.runtime.plan import ASKED, TOKENS, Buffer, Matrix, Plan, View
from hfaccel.runtime.plan_abi import Step
from hfaccel.runtime.plan_ops import Attend, CacheWrite, Embed, Gather, Join, Logits, Rope, Rotary
from hfaccel.runtime.plan_reference import Reference
from hfaccel_kernels import native
from plans import Steps, close, logits

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")
VOCAB = 256


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attention_alone(heads, kv_heads, size, *, rotary=0, interleaved=False, **options) -> Plan:
    """A plan of one attention: rows of a table as q, k and v in, the heads' outputs out."""
    joined = heads * size
    plan = Plan([], [], vocab=VOCAB, out_width=joined, dtype=torch.float32)

    def buffer(width, rows=TOKENS):
        plan.buffers.append(Buffer("b", width, rows))
        return len(plan.buffers) - 1

    width = joined + 2 * kv_heads * size
    x = buffer(width)
    plan.ops.append(Embed(name="table", out=x, table=Matrix(VOCAB, width, torch.randn(VOCAB, width))))
    q = View(x, 0, heads, size, size)
    k, v = (View(x, joined + at * kv_heads * size, kv_heads, size, size) for at in range(2))
    if rotary:
        table = buffer(rotary)
        plan.ops.append(Rope(name="rope", out=table, inv_freq=10 ** -torch.linspace(0, 3, rotary // 2)))
        turned = []
        for view in (q, k):
            out = buffer(view.count * size)
            plan.ops.append(Rotary(name="turn", x=view, table=table, out=out, interleaved=interleaved))
            turned.append(View(out, 0, view.count, size, size))
        q, k = turned
    attended, out, asked = buffer(joined), buffer(joined), buffer(joined, ASKED)
    attend = Attend(name="attend", layer=0, q=q, k=k, v=v, out=attended, scale=0.7 * size**-0.5, **options)
    plan.ops += [
        CacheWrite(name="cache", layer=0, k=k, v=v),
        attend,
        Join(name="join", layer=0, x=attended, out=out, attend=attend),
        Gather(name="asked", x=out, out=asked),
        Logits(name="out", x=asked, n=joined),
    ]
    plan.check()
    return plan


def options_of(case, heads):
    sinks, slopes = 2 * torch.randn(heads), 0.05 * torch.rand(heads)
    return {
        "sinks": {"sinks": sinks},
        "alibi": {"slopes": slopes},
        "all": {"sinks": sinks, "slopes": slopes, "window": 90, "softcap": 3.0},
        "rotary": {"rotary": 16},
        "interleaved": {"rotary": 16, "interleaved": True},
        "interleaved, whole": {"rotary": 24, "interleaved": True},
    }[case]


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("case", ["sinks", "alibi", "all", "rotary", "interleaved", "interleaved, whole"])
def test_options_equal_the_reference_however_steps_are_cut(case, heads, kv_heads, kv_bits):
    options = options_of(case, heads)
    plan = attention_alone(heads, kv_heads, 24, **options)
    model, ids = tiny.tiny("llama"), tiny.ids(1, 210)[0]
    want = Steps(model, Reference(model, plan), kv_bits=kv_bits).run(ids)[0]
    steps = Steps(model, Native(model, plan), kv_bits=kv_bits)
    torch.set_num_threads(1)
    whole = steps.run(ids)[0]
    # INT8 pages: a rotation's last bit may turn a code over, a step of 1/127
    close(whole, want, 2e-2 if kv_bits and "rotary" in options else 1e-5)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(steps.run(ids, cuts=[130, 131, 190, 208, 209])[0], whole), threads


@pytest.mark.parametrize(
    "change", [{"sinks": None}, {"slopes": None}, {"window": 0}, {"softcap": 0.0}], ids=str
)
def test_every_option_counts(change):
    options = options_of("all", 4)
    model, ids, found = tiny.tiny("llama"), tiny.ids(1, 120)[0], []
    for chosen in (options, options | change):
        torch.manual_seed(1)
        plan = attention_alone(4, 2, 24, **chosen)
        found.append(Steps(model, Native(model, plan)).run(ids, cuts=[119])[0])
    assert (found[0] - found[1])[-1].abs().max() > 1e-3


def test_a_nan_in_int8_pages_stays_one():
    """Of one key, in a channel that is not the last vector's: whoever sees the key gets it, nobody else."""
    plan, model, ids = attention_alone(4, 2, 40), tiny.tiny("llama"), torch.arange(12)
    plan.ops[0].table.weight[7, 4 * 40 + 3] = float("nan")  # token 7, key of KV head 0
    out = Steps(model, Native(model, plan), kv_bits=8).run(ids)[0].view(12, 2, 80)
    assert out[7:, 0].isnan().all()
    assert out[:7].isfinite().all() and out[:, 1].isfinite().all()


def test_pages_of_a_sequence_without_tokens_are_not_looked_at():
    """A decode step of two rows, the second with no token, any length and no page."""
    plan, model = attention_alone(4, 2, 24, window=9), tiny.tiny("llama")
    steps = Steps(model, Native(model, plan))
    sequence = steps.runner.sequence()
    sequence.extend(1)
    tables = torch.tensor([[sequence.pages[0]], [-1]], dtype=torch.int32)

    def step(lengths):
        inputs = ([3], [0], [0]), ([0, 1, 1], lengths)
        (ids, positions, rows), (starts, lengths) = (map(torch.tensor, group) for group in inputs)
        starts, lengths = starts.int(), lengths.int()
        return steps.runner.executor.step(steps.runner.pool, ids, positions, tables, starts, lengths, rows)

    assert torch.equal(step([1, 0]), step([1, 2**31 - 1]))


@pytest.mark.parametrize("pages", [1, 5, 16, 64])
def test_page_size_changes_no_bit(pages):
    model, ids = tiny.tiny("llama"), tiny.ids(1, 100)[0]
    want = Steps(model, executor(model)).run(ids)[0]
    got = Steps(model, executor(model), page_tokens=pages).run(ids, cuts=[33, 66, 67, 68])[0]
    assert torch.equal(got, want)


def test_long_context_shared_by_threads():
    """Decode at 700 slots: threads share a head by blocks of keys and join them in order."""
    model, ids = tiny.tiny("llama", max_position_embeddings=1024), tiny.ids(1, 703)[0]
    steps = Steps(model, executor(model))
    torch.set_num_threads(1)
    want = steps.run(ids)[0]
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(steps.run(ids, cuts=[699, 700, 701, 702])[0], want)
    close(want, logits(model, ids))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_blocks_are_joined_to_segments_far_from_the_start(family):
    """Beyond 4,096 slots threads share segments of several blocks, which begin where the slot alone says."""
    small = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 1}
    window = {"sliding_window": 5000} if family == "mistral" else {}
    model = tiny.tiny(family, attn="sdpa", max_position_embeddings=1 << 14, **small, **window)
    ids, steps = tiny.ids(1, 8700)[0], Steps(model, executor(model))
    sequence = steps.runner.sequence()
    steps.runner.prefill([ids[:-10]], [torch.arange(8690)], [sequence])
    at = torch.arange(8690, 8700)
    want = steps.runner.step(ids[-10:], at, [sequence], [10], torch.arange(10))
    with torch.no_grad():
        close(want, model(ids[None], logits_to_keep=10).logits[0])
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        sequence.rollback(10)
        for i, row in enumerate(want):
            one = steps.runner.step(ids[at[i]].view(1), at[i].view(1), [sequence], [1], torch.tensor([0]))
            assert torch.equal(one[0], row), threads
    sequence.free()


def test_scratch_grows_with_the_logarithm_of_the_context():
    """What a thread keeps apart at 1,048,576 slots: 10 doublings beyond 64 blocks, 32 segments each."""
    encoded = executor(tiny.tiny("llama"))._encoded
    starts = torch.tensor([0, 1], dtype=torch.int32)

    def scratch(slots):
        lengths = torch.tensor([slots], dtype=torch.int32)
        sizes = []
        for threads in (1, 2):
            step = Step(tokens=1, asked=1, sequences=1, ahead=1, threads=threads, replicate=0)
            step.q_starts, step.lengths = starts.data_ptr(), lengths.data_ptr()
            arguments = ctypes.byref(encoded.c), ctypes.byref(step)
            sizes.append(native.library().hfa_plan_arena(*arguments))
        return sizes[1] - sizes[0]

    rows, size = 4, 16 + 2  # query heads, and floats of one head's state
    short, long = scratch(1 << 12), scratch(1 << 20)
    assert long - short == 8 * 32 * rows * size * 4
    assert scratch(1 << 19) < long < 1 << 17


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_ratios(heads, kv_heads, head_dim):
    sizes = {"hidden_size": 96, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = tiny.tiny("llama", **sizes, head_dim=head_dim, num_hidden_layers=1)
    ids = tiny.ids(1, 70)[0]
    want = logits(model, ids)
    close(Steps(model, executor(model)).run(ids, cuts=[66, 67, 68])[0], want)
    # int8 pages: half a step of 1/127 for each of K and V
    close(Steps(model, executor(model), kv_bits=8).run(ids, cuts=[66, 67, 68])[0], want, 0.1)
