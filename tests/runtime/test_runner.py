"""runner.py and modules.py: the step itself, whatever its shape; who runs it; what an error leaves behind."""

import gc
import threading
from itertools import combinations

import pytest
import torch

from hfaccel.errors import PatchError
from hfaccel.generate import mixin
from hfaccel.runtime import Unsupported, runner
from hfaccel_kernels import native
from runners import dense, running
from tiny import ids, tiny


@pytest.fixture(autouse=True)
def _modules_only(monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")


def feed(run, parts, sequences):
    """One step over parts[b] (1-d ids): logits of all tokens, cut by sequence."""
    counts = [len(part) for part in parts]
    positions = torch.cat(
        [torch.arange(s.length, s.length + n) for s, n in zip(sequences, counts, strict=True)]
    )
    out = run.step(torch.cat(parts), positions, sequences, counts, torch.arange(sum(counts)))
    return out.split(counts)


@pytest.mark.parametrize("family", ["TL", "gemma2", "gpt_oss", "gpt2", "bloom"])
def test_mixed_steps_equal_dense_forwards(family):
    """Prefill of one row, a chunk of another and decode of a third share a step; then roles change."""
    model, run = running(family)
    rows = [ids(1, n, seed=n)[0] for n in (9, 14, 6)]
    want = [dense(model, row) for row in rows]
    sequences = [run.sequence() for _ in rows]
    plan = [(0, 5, 5), (9, 1, 0), (0, 7, 1), (0, 1, 0)]
    done, got = [0, 0, 0], [[], [], []]
    for counts in plan:
        parts = [row[at : at + n] for row, at, n in zip(rows, done, counts, strict=True)]
        for b, out in enumerate(feed(run, parts, sequences)):
            got[b].append(out)
            done[b] += counts[b]
    for b in range(3):
        torch.testing.assert_close(torch.cat(got[b]), want[b][: done[b]], atol=1e-4, rtol=0)
    for s in sequences:
        s.free()
    assert run.pool.used_pages == 0


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_chunked_prefill_equals_a_whole_one(kv_bits):
    model, run = running(kv_bits=kv_bits)
    prompts = [ids(1, n, seed=n)[0] for n in (23, 1, 40)]
    positions = [torch.arange(len(p)) for p in prompts]
    out = []
    for chunk in (512, 7):
        sequences = [run.sequence(expect_tokens=len(p)) for p in prompts]
        steps = run.steps
        out.append(run.prefill(prompts, positions, sequences, chunk_tokens=chunk))
        assert run.steps - steps == (1 if chunk == 512 else -(-64 // 7))
        for s in sequences:
            s.free()
    torch.testing.assert_close(out[1], out[0], atol=1e-4 if kv_bits is None else 0.1, rtol=0)
    if kv_bits is None:
        for row, prompt in zip(out[0], prompts, strict=True):
            torch.testing.assert_close(row, dense(model, prompt)[-1], atol=1e-4, rtol=0)


def test_rollback_then_go_on_equals_never_having_gone():
    model, run = running()
    row, wrong = ids(1, 15, seed=1)[0], ids(1, 6, seed=2)[0]
    s = run.sequence()
    feed(run, [row[:9]], [s])
    feed(run, [wrong], [s])
    s.rollback(6)
    torch.testing.assert_close(feed(run, [row[9:]], [s])[0], dense(model, row)[9:], atol=1e-4, rtol=0)


def test_asked_rows_come_in_the_order_asked_and_hidden_states_on_demand():
    for family in ("TL", "bloom"):
        model, run = running(family)
        parts = [ids(1, 4, seed=3)[0], ids(1, 3, seed=4)[0]]
        sequences = [run.sequence(), run.sequence()]
        positions = torch.cat([torch.arange(4), torch.arange(3)])
        rows = torch.tensor([6, 0, 3])
        out = run.step(torch.cat(parts), positions, sequences, [4, 3], rows)
        want = torch.cat([dense(model, part) for part in parts])[rows]
        torch.testing.assert_close(out, want, atol=1e-4, rtol=0)
        for s in sequences:
            s.rollback(s.length)
        hidden = run.step(torch.cat(parts), positions, sequences, [4, 3], rows, hidden=True)
        torch.testing.assert_close(model.get_output_embeddings()(hidden), want, atol=1e-4, rtol=0)
        none = run.step(parts[0], torch.arange(4), sequences[:1], [4], rows[:0])
        assert none.shape[0] == 0 and sequences[0].length == 8


def test_an_error_in_a_step_leaves_every_length_as_it_was():
    model, run = running()
    sequences = [run.sequence(), run.sequence()]
    feed(run, [ids(1, 5)[0], ids(1, 2)[0]], sequences)
    hook = model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(run, [ids(1, 9)[0], ids(1, 1)[0]], sequences)
    hook.remove()
    assert [s.length for s in sequences] == [5, 2] and run.pool.used_pages == 3
    row = torch.cat([ids(1, 5)[0], ids(1, 4, seed=8)[0]])
    got = feed(run, [row[5:], ids(1, 1)[0]], sequences)[0]
    torch.testing.assert_close(got, dense(model, row)[5:], atol=1e-4, rtol=0)


def test_threads_share_a_runner():
    model, run = running()
    prompts = [ids(1, n, seed=n) for n in (5, 11, 17)]
    kwargs = dict(max_new_tokens=8, do_sample=False)
    want = [model.generate(p, **kwargs) for p in prompts]
    got = [None] * 3

    def work(i):
        got[i] = model.generate(prompts[i], **kwargs)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) and run.pool.used_pages == 0


def test_choice_of_an_executor(monkeypatch):
    model, run = running()
    monkeypatch.setenv("HFACCEL_EXECUTOR", "fast")
    with pytest.raises(PatchError, match="'fast'; known are auto, graphs, native, modules"):
        run.refresh()
    monkeypatch.setenv("HFACCEL_EXECUTOR", "auto")
    monkeypatch.setitem(runner.EXECUTORS, "native", (f"{__name__}:never", {"cpu"}))
    monkeypatch.setattr(runner, "import_module", lambda name: Modules if name == __name__ else real(name))
    assert run.refresh().name == "modules" and run.skipped == {"native": "not today"}
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    run.executor = None
    with pytest.raises(PatchError, match="native: not today"):
        run.refresh()


real = runner.import_module


class Modules:
    @staticmethod
    def never(model):
        raise Unsupported("not today")


def test_the_fingerprint_sees_what_changes_a_model():
    model, run = running()
    first = run.refresh()
    assert run.refresh() is first
    seen = [runner.fingerprint(model)]
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 176, bias=False)
    seen.append(runner.fingerprint(model))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    seen.append(runner.fingerprint(model))
    model.model.norm.register_forward_hook(lambda *_: None)
    seen.append(runner.fingerprint(model))
    model.to(torch.bfloat16)
    seen.append(runner.fingerprint(model))
    assert all(one != other for one, other in combinations(seen, 2)) and run.refresh() is not first


def test_a_model_whose_masks_say_more_is_not_packed(monkeypatch):
    """The masks of a window that the attention call does not name: found at the first step, run with its
    own."""
    model, run = running("mistral")
    plain = tiny("mistral")
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn.config, "sliding_window", 8)
    attention = type(model.model.layers[0].self_attn)
    source = attention.forward

    def forward(self, *args, **kwargs):
        class Hidden:
            def __getattr__(inner, name):
                return None if name == "sliding_window" else getattr(config, name)

        config, self.config = self.config, Hidden()
        try:
            return source(self, *args, **kwargs)
        finally:
            self.config = config

    x = ids(2, 20)
    want = plain.generate(x, max_new_tokens=5, do_sample=False)
    monkeypatch.setattr(attention, "forward", forward)
    assert torch.equal(model.generate(x, max_new_tokens=5, do_sample=False), want)
    told = mixin.explain(model)
    assert told["mode"] == "dense" and "windows {8}" in told["why"]


@pytest.mark.parametrize("family", ["bloom", "falcon", "falcon_mq"])
def test_a_cut_prompt_of_a_model_that_runs_row_by_row(family):
    """A step whose first sequence ends in it and whose second does not: hidden states and logits meet."""
    model, run = running(family)
    rows = [ids(1, n, seed=n)[0] for n in (9, 14)]
    sequences = [run.sequence() for _ in rows]
    got = run.prefill(rows, [torch.arange(len(r)) for r in rows], sequences, chunk_tokens=12)
    for row, logits in zip(rows, got, strict=True):
        torch.testing.assert_close(logits, dense(model, row)[-1], atol=1e-4, rtol=0)
    none = run.step(rows[0][:1], torch.tensor([9]), sequences[:1], [1], torch.arange(0))
    assert none.shape[0] == 0


@pytest.mark.skipif(not native.available(), reason=f"no C++ kernels: {native.reason()}")
def test_steps_ahead_stay_within_a_budget(monkeypatch):
    """Where one more step fits, a run of four does not refuse."""
    monkeypatch.setenv("HFACCEL_EXECUTOR", "auto")
    model = tiny("llama")
    run = runner.Runner(model, page_tokens=4, budget_pages=2)
    assert run.refresh().name == "native"
    sequence = run.sequence()
    prompt = ids(1, 5)[0]
    token = run.prefill([prompt], [torch.arange(5)], [sequence]).argmax(-1)
    found = []
    while sequence.length < 8:
        position = torch.tensor([sequence.length])
        found += run.greedy(token, position, [sequence], ahead=8)[:, 0].tolist()
        token = torch.tensor(found[-1:])
    assert found == tiny("llama").generate(prompt[None], max_new_tokens=4, do_sample=False)[0, 6:].tolist()
    with pytest.raises(PatchError, match="all 2 KV pages"):
        run.greedy(token, torch.tensor([8]), [sequence], ahead=1)
    run = runner.Runner(model, page_tokens=4, budget_pages=3)
    sequence = run.sequence()
    run.prefill([prompt[:2]], [torch.arange(2)], [sequence])
    twin = sequence.fork()  # its first token copies the shared page: 6 tokens fit, not 10
    assert len(run.greedy(token, torch.tensor([2]), [twin], ahead=8)) == 4 and twin.length == 6


def test_a_returned_cache_does_not_keep_a_moved_model_from_generating():
    """Its pages stay what they are; new ones are of the new dtype."""
    model, run = running("llama")
    args = dict(max_new_tokens=3, do_sample=False)
    out = model.generate(ids(1, 5), return_dict_in_generate=True, **args)
    held = next(v for k, v in out.items() if k in ("cache", "past_key_values"))
    before = held.layers[0].keys
    model.to(torch.bfloat16)
    plain = tiny("llama").to(torch.bfloat16)
    beams = dict(num_beams=2, **args)
    assert torch.equal(model.generate(ids(1, 5), **beams), plain.generate(ids(1, 5), **beams))
    assert torch.equal(model.generate(ids(1, 5), **args), plain.generate(ids(1, 5), **args))
    assert torch.equal(held.layers[0].keys, before) and before.dtype == torch.float32
    del out, held
    gc.collect()
    assert run.pool.used_pages == 0


def test_sequences_of_a_model_that_was_moved_are_refused():
    model, run = running("llama")
    sequence = run.sequence()
    prompt = ids(1, 5)[0]
    run.prefill([prompt], [torch.arange(5)], [sequence])
    model.to(torch.bfloat16)
    run.refresh()
    with pytest.raises(PatchError, match="moved or re-typed"):
        run.step(prompt[:1], torch.tensor([5]), [sequence], [1], torch.arange(1))


@pytest.mark.parametrize("name", ["HFACCEL_STRICT", "HFACCEL_ISA"])
def test_settings_of_the_environment_are_read_again(name, monkeypatch):
    _, run = running()
    before = run.refresh()
    monkeypatch.setenv(name, "1" if name == "HFACCEL_STRICT" else "scalar")
    assert run.refresh() is not before


def test_candidates_of_an_executor_that_has_none():
    model, run = running()
    sequence, prompt = run.sequence(), ids(1, 6)[0]
    run.prefill([prompt[:5]], [torch.arange(5)], [sequence])
    values, found, logits = run.candidates(prompt[5:], torch.tensor([5]), [sequence], 7)
    want = dense(model, prompt)[-1:]
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)
    assert torch.equal(values, logits.gather(1, found)) and torch.equal(values, logits.topk(7).values)


def test_no_thread_moves_pages_under_a_step():
    """The pool grows by copying: what a step writes meanwhile would be lost."""
    _, run = running()
    grow = threading.Thread(target=run.pool.reserve, args=(1000,))
    real = run.refresh()

    class Watched:
        name = "modules"

        def step(self, pool, *args, **kwargs):
            before = pool.version
            grow.start()
            grow.join(0.2)
            assert pool.version == before and grow.is_alive()
            return real.step(pool, *args, **kwargs)

    run.executor = Watched()
    sequence = run.sequence(expect_tokens=4)
    feed(run, [ids(1, 3)[0]], [sequence])
    grow.join()
    assert run.pool.capacity >= 1000
    sequence.free()


HOOK = []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.model.layers[0].mlp, "forward", torch.neg),
        lambda m: setattr(m.model.layers[0].mlp, "__class__", torch.nn.Identity),
        lambda m: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 5.0),
        lambda m: setattr(m.model.layers[0].self_attn, "scaling", 1.0),
        lambda m: setattr(m.model.layers[0].mlp.gate, "top_k", 1),
        lambda m: setattr(m.config, "final_logit_softcapping", 3.0),
        lambda m: setattr(m.config, "layer_types", ["full_attention", "sliding_attention"]),
        lambda m: m.config.rope_parameters.update(rope_theta=123.0),
        lambda m: setattr(m.model.layers[0].self_attn, "layer_idx", -2),  # hash(-1) == hash(-2)
        lambda m: m.model.layers[0].register_forward_hook(print),
        lambda m: (HOOK.pop().remove(), m.model.norm.register_forward_hook(print)),  # as many as before
    ],
)
def test_every_change_that_a_plan_would_miss_rebuilds_the_executor(change):
    model, run = running("mixtral")
    HOOK[:] = [model.model.norm.register_forward_hook(lambda *_: None)]
    model.model.layers[0].self_attn.layer_idx = -1
    before = run.refresh()
    assert run.refresh() is before
    change(model)
    assert run.refresh() is not before


def test_a_class_whose_forward_is_exchanged_rebuilds_the_executor(monkeypatch):
    model, run = running()
    before = run.refresh()
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: -x)
    assert run.refresh() is not before


def test_a_forced_kernel_backend_binds_the_plan(monkeypatch):
    model = tiny("llama")
    made = runner.Runner(model)
    monkeypatch.setenv("HFACCEL_EXECUTOR", "auto")
    assert made.refresh().name == "native"
    monkeypatch.setenv("HFACCEL_BACKEND", "reference")
    assert made.refresh().name == "modules" and "HFACCEL_BACKEND" in made.skipped["native"]
    monkeypatch.setenv("HFACCEL_BACKEND", "fast")
    with pytest.raises(ValueError, match="known are auto, reference, native, triton"):
        made.refresh()


_EDITS = {
    "gemma2": [
        lambda m: setattr(m.model.layers[1].self_attn, "attn_logit_softcapping", 0.5),
        lambda m: setattr(m.model.layers[0].self_attn, "attn_logit_softcapping", None),
        lambda m: setattr(m.config, "attn_logit_softcapping", 0.5),  # read when the model was made
        lambda m: setattr(m.config, "final_logit_softcapping", 1.0),
        lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.3),
        lambda m: setattr(m.model.norm, "eps", 0.5),
    ],
    "qwen3_moe": [
        lambda m: setattr(m.model.layers[0].mlp.gate, "norm_topk_prob", True),
        lambda m: setattr(m.model.layers[1].mlp.gate, "top_k", 1),
    ],
    "llama": [
        lambda m: setattr(m.model.rotary_emb, "attention_scaling", 0.5),
        lambda m: m.model.rotary_emb.inv_freq.mul_(0.5),
        lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
    ],
}


@pytest.mark.parametrize("executor", ["modules", "auto"])
@pytest.mark.parametrize("family", _EDITS)
@torch.no_grad()
def test_edits_of_modules_and_config_after_patch_are_followed(family, executor, monkeypatch):
    monkeypatch.setenv("HFACCEL_EXECUTOR", executor)
    plain, model = tiny(family), tiny(family)
    mixin.install(model)
    details = dict(do_sample=False, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
    for edit in _EDITS[family]:
        model.generate(ids(2, 12), **details)
        edit(plain)
        edit(model)
        want, got = (torch.stack(one.generate(ids(2, 12), **details).logits) for one in (plain, model))
        torch.testing.assert_close(got, want, atol=3e-4, rtol=0)
