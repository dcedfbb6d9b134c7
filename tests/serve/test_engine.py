"""engine.py: whatever shares a step, every request gets what it gets alone, and every page comes back."""

import pytest
import torch

from engines import check_pages_are_back, exact, mixed, patched, prompt_of, run, solo
from hfaccel.errors import PatchError
from hfaccel.serve.engine import Engine
from hfaccel.serve.requests import Options, Request
from hfaccel.serve.scheduler import Limits
from hfaccel_kernels.layouts import Layout

pytestmark = pytest.mark.usefixtures("strict")


@exact
@pytest.mark.parametrize(
    "variant",
    [
        {"family": "llama"},
        {"family": "gemma2"},
        {"family": "gpt2", "kv_bits": 8},
        {"family": "llama", "layout": Layout(8), "dtype": torch.bfloat16},
        {"family": "llama", "layout": Layout(4, 64, False, "fp16"), "kv_bits": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_greedy_answers_are_those_of_generate(variant, chunked, preemption):
    """Bit for bit in the native plan, with chunks, hits in the prefix tree and preemption."""
    model = patched(**variant)
    asked = mixed(model)
    limits = Limits(token_budget=11, chunked=chunked, preemption=preemption)
    engine = Engine(model, pages=17, limits=limits)
    assert engine.runner.refresh().name == "native"
    requests = run(engine, *(Request(prompt, Options(max_new_tokens=new)) for prompt, new, _ in asked))
    for request, (_, _, want) in zip(requests, asked, strict=True):
        assert request.output == want and request.finish_reason == "length"
    stats = engine.stats()
    assert stats["preemptions"] and stats["cached_tokens"]
    assert engine.scheduler.swap is None or engine.scheduler.swap.restored
    check_pages_are_back(engine)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_modules_answer_with_the_best_tokens_of_a_dense_forward(family, monkeypatch):
    """Where a sum may differ by an ulp: each token is the best one of transformers' own forward, or as good
    as that."""
    monkeypatch.setenv("HFACCEL_EXECUTOR", "modules")
    model = patched(family)
    engine = Engine(model, pages=17, limits=Limits(token_budget=11))
    assert engine.runner.refresh().name == "modules"
    head = prompt_of(9, 99)
    prompts = [(head if n % 2 else []) + prompt_of(3 + 4 * n, n) for n in range(6)]
    for request in run(engine, *(Request(prompt, Options(max_new_tokens=9)) for prompt in prompts)):
        with torch.no_grad():
            logits = model(torch.tensor([request.tokens]), use_cache=False).logits[0]
        at = torch.arange(len(request.prompt) - 1, request.length - 1)
        chosen = logits[at, torch.tensor(request.output)]
        assert len(request.output) == 9 and (logits[at].max(-1).values - chosen).max() < 1e-3
    assert engine.stats()["preemptions"] and engine.stats()["cached_tokens"]
    check_pages_are_back(engine)


@exact
def test_prompts_that_are_all_cached(model):
    """Case K6: lengths around and at multiples of the page, then shared beginnings, then recycled pages."""
    engine = Engine(model, pages=20)
    for length in (3, 4, 5, 8, 12):
        prompt = prompt_of(length, 40 + length)
        want = solo(model, prompt, 4)
        first, second = (run(engine, Request(prompt, Options(max_new_tokens=4)))[0] for _ in range(2))
        assert first.output == second.output == want
        assert first.cached_tokens == 0
        # whole pages of the prompt, and of the answer behind it; one token is always computed
        assert second.cached_tokens == min(length - 1, (length + 3) // 4 * 4)
    for _ in range(2):
        head = prompt_of(8, 7)
        for tail in (1, 2):
            prompt = head + prompt_of(3, tail)
            (request,) = run(engine, Request(prompt, Options(max_new_tokens=4)))
            assert request.output == solo(model, prompt, 4)
        assert request.cached_tokens >= 8
        for seed in range(100, 106):  # every page is used again
            run(engine, Request(prompt_of(15, seed), Options(max_new_tokens=2)))
        assert engine.tree.evicted
    check_pages_are_back(engine)


@exact
def test_seeded_draws_repeat_whatever_runs_beside_them(model):
    options = Options(max_new_tokens=24, temperature=1.2, top_k=40, top_p=0.95, seed=5)
    prompt = prompt_of(9, 1)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    (alone,) = run(Engine(model, pages=50), Request(prompt, options))
    torch.manual_seed(4)
    crowd = Engine(model, pages=14, limits=Limits(token_budget=6))
    others = [Request(prompt_of(5 + n, n), Options(max_new_tokens=24, temperature=1.0)) for n in range(6)]
    found = run(crowd, *others[:3], Request(prompt, options), *others[3:])[3]
    assert found.output == alone.output and crowd.stats()["preemptions"]
    torch.manual_seed(3)
    (again,) = run(Engine(model, pages=50), Request(prompt, options))
    assert again.output == alone.output
    assert torch.equal(torch.random.get_rng_state(), state)
    (other,) = run(Engine(model, pages=50), Request(prompt, Options(**(vars(options) | {"seed": 6}))))
    assert other.output != alone.output


@exact
def test_greedy_and_drawn_requests_share_steps(model):
    """Chunks, plain rows and drawn ones in one step: each is what it is alone."""
    prompts = [prompt_of(5 + 3 * n, n) for n in range(6)]
    options = [Options(max_new_tokens=8, temperature=float(n % 2), seed=n) for n in range(6)]
    alone = [
        run(Engine(model, pages=50), Request(*ask))[0].output for ask in zip(prompts, options, strict=True)
    ]
    engine = Engine(model, pages=50, limits=Limits(token_budget=9))
    together = run(engine, *(Request(*ask) for ask in zip(prompts, options, strict=True)))
    assert [request.output for request in together] == alone
    assert alone[0] == solo(model, prompts[0], 8) and alone[1] != solo(model, prompts[1], 8)


@exact
def test_ends(model):
    prompt = prompt_of(7, 3)
    free = solo(model, prompt, 12)
    end = free[5]
    at = free.index(end) + 1
    engine = Engine(model, pages=50)

    def answer(**options):
        (request,) = run(engine, Request(prompt, Options(max_new_tokens=12, **options)))
        return request.output, request.finish_reason

    assert answer() == (free, "length")
    assert answer(stop_ids=[end]) == (free[:at], "stop")
    before = model.generation_config.eos_token_id
    try:
        for ends in (end, [255, end]):
            model.generation_config.eos_token_id = ends
            assert answer() == (free[:at], "stop")
            assert answer()[0] == solo(model, prompt, 12)
            assert answer(ignore_eos=True) == (free, "length")
            assert answer(ignore_eos=True, stop_ids=[end]) == (free[:at], "stop")
    finally:
        model.generation_config.eos_token_id = before
    seen = []
    (request,) = run(
        engine,
        Request(
            prompt,
            Options(max_new_tokens=12),
            listener=lambda r, token: seen.append(token),
            stop=lambda output: len(output) == 3,
        ),
    )
    assert (request.output, request.finish_reason) == (free[:3], "stop") and seen == [*free[:3], None]


@exact
def test_edited_weights_find_no_pages_of_former_ones():
    model = patched()
    engine, prompt = Engine(model, pages=50), prompt_of(12, 1)
    run(engine, Request(prompt, Options(max_new_tokens=4)))
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    (after,) = run(engine, Request(prompt, Options(max_new_tokens=4)))
    assert after.cached_tokens == 0 and after.output == solo(model, prompt, 4)
    (again,) = run(engine, Request(prompt, Options(max_new_tokens=4)))
    assert again.cached_tokens == 11 and again.output == after.output


@exact
def test_a_retyped_model_goes_on_over_new_pages():
    model = patched()
    engine, prompt = Engine(model, pages=50), prompt_of(12, 1)
    run(engine, Request(prompt, Options(max_new_tokens=4)))
    under_way = engine.submit(Request(prompt_of(9, 2), Options(max_new_tokens=20)))
    engine.step()
    model.to(torch.bfloat16)
    (after,) = run(engine, Request(prompt, Options(max_new_tokens=4)))
    assert after.cached_tokens == 0 and after.output == solo(model, prompt, 4)
    assert len(under_way.output) == 20 and under_way.preemptions == 1
    assert engine.pool.layers[0].k.dtype == torch.bfloat16
    check_pages_are_back(engine)


def test_pages_come_from_the_memory_budget(model):
    """Room for every request at the model's full context, where memory allows for that much."""
    assert Engine(model, limits=Limits(max_running=3)).pool.capacity == 3 * 512 // 4
    with pytest.raises(PatchError, match="nothing is left for keys and values"):
        Engine(model, memory_utilization=1e-9)
