"""Several steps in one call of the C++ executor, and the best logits that it hands over."""

import pytest
import torch
from torch import nn

import tiny
from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.errors import PatchError
from hfaccel.runtime.native import executor
from hfaccel.runtime.runner import Runner
from hfaccel_kernels import native
from hfaccel_kernels.layouts import Layout
from plans import quantize

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")

INT4 = Layout(4, 64, False, "fp16")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_are_the_largest_logits(threads, dtype):
    """Values and ids of a step's best against a stable sort of the logits it wrote, ties by id."""
    torch.set_num_threads(threads)
    model, rows = tiny.tiny("llama").to(dtype), torch.tensor([4, 11])
    with torch.no_grad():
        model.get_output_embeddings().weight[40:90] = model.get_output_embeddings().weight[3]  # ties
    run, pool = executor(model), PagePool()
    sequence = Sequence(pool)
    sequence.extend(12)
    tables = torch.from_numpy(sequence.table[None].copy())
    starts, lengths = torch.tensor([0, 12], dtype=torch.int32), torch.tensor([12], dtype=torch.int32)
    inputs = (tiny.ids(1, 12)[0], torch.arange(12), tables, starts, lengths, rows)
    want = run.step(pool, *inputs)
    for top in (1, 5, 64, model.config.vocab_size):
        values, found, logits = run.best(pool, *inputs, top=top)
        assert torch.equal(logits, want) and values.shape == found.shape == (1, 2, top)
        order = want.float().sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values[0], order.values[:, :top])
        assert torch.equal(found[0], order.indices[:, :top])


def test_candidates_of_chunks_are_those_of_the_rows_asked_for():
    """A prompt's chunk and a decode in one call, against a step's logits."""
    run = Runner(tiny.tiny("llama"))
    first, second = run.sequence(), run.sequence()
    run.step(tiny.ids(1, 5)[0], torch.arange(5), [first], [5], torch.tensor([4]))
    args = (tiny.ids(1, 8, seed=2)[0], torch.tensor([5, *range(7)]), [first, second])
    rows = torch.tensor([7, 0])
    want = run.step(*args, [1, 7], rows)
    first.rollback(1), second.rollback(7)
    values, found, logits = run.candidates(*args, 3, counts=[1, 7], rows=rows)
    assert torch.equal(logits, want) and (first.length, second.length) == (6, 7)
    order = want.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :3]) and torch.equal(found, order.indices[:, :3])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("case", ["-inf", "nan", "-nan", "nans", "all nan", "all -inf", "inf and nan"])
def test_candidates_of_extreme_logits_are_those_of_torch(case, threads):
    """-inf is a value like others, NaN comes before all: the arg-max, and torch's own stable sort."""
    torch.set_num_threads(threads)
    model = tiny.tiny("llama")
    model.lm_head = nn.Linear(64, 256)
    bias = model.lm_head.bias.data.zero_()
    if case == "-inf":
        bias[5:] = -float("inf")
    elif case == "inf and nan":
        bias[70], bias[71], bias[100] = float("inf"), -float("inf"), float("nan")
    elif case.startswith("all"):
        bias[:] = float(case[4:])
    else:
        bias[[200] if case != "nans" else [210, 130, 30]] = float("nan")
        bias[180], bias[201] = 90.0, 80.0
        if case == "-nan":
            bias[200].view(torch.int32).bitwise_or_(-(2**31))
    run, pool = executor(model), PagePool()
    sequence = Sequence(pool)
    sequence.extend(3)
    tables = torch.from_numpy(sequence.table[None].copy())
    starts, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    for top in (1, 3, 12, 256):
        inputs = (tiny.ids(1, 3)[0], torch.arange(3), tables, starts, lengths, torch.tensor([2]))
        values, found, logits = run.best(pool, *inputs, top=top)
        order = logits.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(found[0], order.indices[:, :top])
        assert torch.equal(values[0].nan_to_num(1e30), order.values[:, :top].nan_to_num(1e30))
        assert found[0, 0, 0] == logits.argmax()


def test_a_run_goes_on_with_a_head_larger_than_the_embedding():
    """And ends before a token that the embedding lacks, which is refused as in single steps."""
    model = tiny.tiny("llama")
    model.lm_head = nn.Linear(64, 300, bias=False)
    with torch.no_grad():
        model.lm_head.weight.normal_()
        model.lm_head.weight[256:] = 0
    runner, ids = Runner(model), tiny.ids(1, 6)[0]
    assert runner.refresh().name == "native"

    def start():
        sequence = runner.sequence()
        return sequence, runner.prefill([ids], [torch.arange(6)], [sequence]).argmax(-1)

    sequence, first = start()
    singles = [first]
    for step in range(8):
        at = torch.tensor([6 + step])
        singles.append(runner.step(singles[-1], at, [sequence], [1], torch.tensor([0])).argmax(-1))
    assert max(singles) < 256
    sequence, first = start()
    chosen = runner.greedy(first, torch.tensor([6]), [sequence], ahead=8)
    assert torch.equal(chosen, torch.stack(singles[1:])) and sequence.length == 14

    with torch.no_grad():
        model.lm_head.weight[299] = 2 * model.lm_head.weight[singles[4]]  # where that logit leads, it wins
    sequence, first = start()
    chosen = runner.greedy(first, torch.tensor([6]), [sequence], ahead=8)
    steps = len(chosen)
    assert chosen[-1] == 299 and chosen[:-1].lt(256).all() and sequence.length == 6 + steps < 14
    with pytest.raises(PatchError, match="token id outside the vocabulary of 256"):
        runner.greedy(chosen[-1], torch.tensor([6 + steps]), [sequence], ahead=8)


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}], ids=["fp32 pages", "int8 pages"])
def test_a_run_of_greedy_steps_is_the_same_steps_one_by_one(options):
    """Tokens and pages; it stops behind an end token, and refuses what single steps would refuse."""
    model = quantize(tiny.tiny("qwen3"), INT4)
    prompts = [tiny.ids(1, n, seed=n)[0] for n in (30, 9, 62)]
    runner = Runner(model, **options)
    assert runner.refresh().name == "native"

    def start():
        sequences = [runner.sequence() for _ in prompts]
        logits = runner.prefill(prompts, [torch.arange(len(p)) for p in prompts], sequences)
        return sequences, logits.argmax(-1), torch.tensor([len(p) for p in prompts])

    sequences, tokens, at = start()
    singles = [tokens]
    for step in range(20):
        rows = torch.arange(3)
        singles.append(runner.step(singles[-1], at + step, sequences, [1] * 3, rows).argmax(-1))
    singles = torch.stack(singles)

    sequences, tokens, at = start()
    seen, lengths = [tokens[None]], at.clone()
    while sum(map(len, seen)) < 21:
        chosen = runner.greedy(seen[-1][-1], lengths, sequences, ahead=min(7, 21 - sum(map(len, seen))))
        lengths = lengths + len(chosen)
        seen.append(chosen)
        assert [s.length for s in sequences] == lengths.tolist()
    assert torch.equal(torch.cat(seen), singles)

    sequences, tokens, at = start()
    end = singles[4, 1]
    first = int((singles[1:] == end).any(1).nonzero()[0])
    ends = torch.tensor([5000, 0, int(end)], dtype=torch.int32)[::2]  # any integers, strided
    chosen = runner.greedy(tokens, at, sequences, ahead=20, ends=ends)
    assert torch.equal(chosen, singles[1 : first + 2])
    assert [s.length for s in sequences] == (at + first + 1).tolist()
    pages = runner.pool.used_pages
    with pytest.raises(PatchError, match="token id outside"):
        runner.greedy(tokens + 10**6, at, sequences, ahead=4)
    assert runner.pool.used_pages == pages and [s.length for s in sequences] == (at + first + 1).tolist()


def test_a_run_ends_at_the_table_of_learned_positions():
    model = tiny.tiny("gpt2", max_position_embeddings=32)
    runner = Runner(model)
    runner.refresh()
    sequence, ids = runner.sequence(), tiny.ids(1, 20)[0]
    runner.prefill([ids], [torch.arange(20)], [sequence])
    with pytest.raises(PatchError, match="beyond the model's table of 32"):
        runner.greedy(ids[:1], torch.tensor([20]), [sequence], ahead=13)
    assert sequence.length == 20
    for far in (2**63 - 1, 2**63 - 2):  # what a sum with the run's length would carry over
        with pytest.raises(PatchError, match="beyond the model's table of 32"):
            runner.greedy(ids[:1], torch.tensor([far]), [sequence], ahead=12)
    assert len(runner.greedy(ids[:1], torch.tensor([20]), [sequence], ahead=12)) == 12
