"""Budgets: bytes to the last one, what is out of reach, that a choice is an ordinary config."""

import copy
import json
import re

import pytest
import torch

import hfaccel
from hfaccel import GPTQ, HQQ, Head, PatchConfig, PatchError
from hfaccel.errors import AlreadyPatched
from hfaccel.match import select
from hfaccel.measure.storage import storage
from hfaccel.quant import search as module
from hfaccel.quant.search import patterns, search
from hfaccel.recipe import Budget
from hfaccel.report import model_bytes
from tiny import ids, tiny


@pytest.fixture
def sensitive(monkeypatch):
    """Sensitivities as a test wants them: 1e-3, or what a name's ending is given."""

    def set_endings(endings):
        def found(model, parts, probes, known, windows, progress):
            names = [sites[0].name for _, sites in probes]
            return [next((v for e, v in endings.items() if name.endswith(e)), 1e-3) for name in names]

        monkeypatch.setattr(module, "sensitivities", found)

    return set_endings


def widths(config, model):
    """Matrix name -> bits."""
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    out = {}
    for transform in config.transforms:
        if isinstance(transform, Head):
            out["lm_head"] = transform.bits
        else:
            out |= dict.fromkeys(select(names, transform.targets), transform.bits)
    return out


@pytest.mark.parametrize("family", ["llama", "gpt2", "TX", "gemma3"])
@pytest.mark.parametrize("bits", [4.6, 6.0])
def test_bits_a_weight_are_kept_to_the_byte(family, bits, caplog):
    """gpt2: Conv1D, tied; TX: fused experts; widths of 112: short groups, which take more."""
    model = tiny(family)
    hfaccel.patch(model, f"auto@{bits}bpw")
    found = storage(model)
    assert bits - 0.5 < found.bits_per_weight <= bits
    said = re.search(r"bpw: ([\d.]+) bits a weight, ([\d.]+) MB of", caplog.text)
    assert float(said[1]) == pytest.approx(found.bits_per_weight, abs=5e-4)
    assert float(said[2]) == round((found.bytes + found.head_bytes) / 1e6, 1)


def test_what_it_prints_is_applied_without_measuring(monkeypatch, tmp_path, caplog):
    model = tiny("TL")
    hfaccel.patch(model, "auto@5bpw+kv8")
    path = tmp_path / "choice.json"
    path.write_text(re.search(r"is the recipe: (.*)", caplog.text)[1])
    monkeypatch.setattr(module, "sensitivities", None)
    twin = hfaccel.patch(tiny("TL"), str(path))
    assert twin._hfaccel.config == model._hfaccel.config
    with torch.no_grad():
        assert torch.equal(twin(ids(1, 9)).logits, model(ids(1, 9)).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_the_whole_model(tied):
    model = tiny("TL", tie_word_embeddings=tied)
    budget = 120_000 if tied else 240_000
    assert model_bytes(model) > 2 * budget
    hfaccel.patch(model, f"auto@{budget / 1e6}MB")
    assert 0.93 * budget < model_bytes(model) <= budget


@pytest.mark.parametrize("ask", ["auto@1bpw", "auto@2.5bpw", "auto@1KB", "auto@0.00001GB"])
def test_a_budget_out_of_reach_names_the_smallest(ask):
    model = tiny("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PatchError, match=f"{ask} is out of reach.*smallest is auto@") as refused:
        hfaccel.patch(model, ask)
    assert not hasattr(model, "_hfaccel")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    smallest = str(refused.value).rpartition(" ")[2]
    assert smallest.endswith("bpw" if "bpw" in ask else "MB")
    hfaccel.patch(model, f"{smallest}-prior")
    assert hfaccel.report(model).model_bytes < hfaccel.report(model).bytes_before / 2


def test_sensitive_matrices_get_more_bits(sensitive):
    sensitive({"layers.2.mlp.up_proj": 1.0, "layers.1.self_attn.v_proj": 0.1, "layers.0.mlp.up_proj": 1e-7})
    model = tiny("TL")
    found = widths(search(model, "auto@4.4bpw"), model)
    assert found["model.layers.2.mlp.up_proj"] == 8
    assert found["model.layers.0.mlp.up_proj"] == 2
    assert found["model.layers.1.self_attn.v_proj"] > found["model.layers.2.self_attn.v_proj"]


def test_a_budget_for_everything_changes_nothing(sensitive):
    sensitive({})
    assert search(tiny("llama"), "auto@32bpw") == PatchConfig()


def test_the_choice_is_stored_and_repeated_without_measuring(monkeypatch, tmp_path):
    model = tiny("TL")
    hfaccel.patch(model, "auto@5bpw+kv8")
    chosen = json.loads(json.dumps(model._hfaccel.config.to_dict()))
    assert chosen["transforms"][-1]["name"] == "kv"
    assert {t["name"] for t in chosen["transforms"]} == {"hqq", "head", "kv"}
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["transforms"]
    assert stored == chosen["transforms"]

    def never(*args, **kwargs):
        raise AssertionError("measured")

    monkeypatch.setattr(module, "sensitivities", never)
    twin = hfaccel.patch(tiny("TL"), chosen)
    assert storage(twin) == storage(model)
    with torch.no_grad():
        assert torch.equal(twin(ids(1, 9)).logits, model(ids(1, 9)).logits)
    hfaccel.patch(model, chosen)  # the same config: nothing to do
    with pytest.raises(AlreadyPatched, match="patched with .hqq.*unpatch"):
        hfaccel.patch(model, "auto@5bpw")
    hfaccel.unpatch(model)
    assert all(torch.equal(t, u) for t, u in zip(model.parameters(), tiny("TL").parameters(), strict=True))


def test_the_same_question_has_the_same_answer():
    torch.manual_seed(5)
    first = search(tiny("llama"), "auto@5bpw")
    after = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), after)  # nothing is drawn from the global generator
    assert search(tiny("llama"), "auto@5bpw") == first


def test_with_calibration_it_is_gptq_on_that_text(monkeypatch):
    model = tiny("llama")
    seen = []
    measure = module.sensitivities
    monkeypatch.setattr(module, "sensitivities", lambda *a: seen.append(a[4]) or measure(*a))
    data = ids(6, 200)
    hfaccel.patch(model, "auto@5bpw", calibration=data)
    assert {t.name for t in model._hfaccel.config.transforms} == {"gptq", "head"}
    (windows,) = seen
    assert windows.shape == (4, 128)
    stream = torch.cat(sorted(data, key=lambda row: row.tolist()))
    assert all(any(torch.equal(w, stream[i : i + 128]) for i in range(0, 1200, 128)) for w in windows)


def test_a_generator_serves_measuring_and_calibrating():
    rows = ids(6, 200)
    config = [
        hfaccel.patch(tiny("llama"), "auto@5bpw", calibration=data)._hfaccel.config
        for data in (rows, iter(rows))
    ]
    assert config[0] == config[1]


def test_little_calibration_is_one_short_window(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "sensitivities", lambda *a: seen.append(a[4]) or [1e-3] * len(a[2]))
    config = search(tiny("llama"), "auto@5bpw", calibration=ids(1, 40))
    assert seen[0].shape == (1, 40) and any(isinstance(t, GPTQ) for t in config.transforms)


def test_the_prior_runs_no_forward_and_favours_ends_and_values(monkeypatch):
    model = tiny("llama", num_hidden_layers=8)
    monkeypatch.setattr(type(model), "forward", None)
    config = search(model, "auto@4.4bpw-prior")
    found = widths(config, model)
    bits = [found[f"model.layers.{i}.self_attn.q_proj"] for i in range(8)]
    assert min(bits[0], bits[7]) >= max(bits[2:6]) and sum(bits[:2]) + sum(bits[6:]) > sum(bits[2:6])
    for i in range(8):
        assert found[f"model.layers.{i}.self_attn.v_proj"] >= found[f"model.layers.{i}.self_attn.q_proj"]


def test_a_matrix_that_no_narrow_grid_holds_stays_wide():
    model = tiny("TL")
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1e8)  # beyond scales in fp16
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1e-8)
    hfaccel.patch(model, "auto@6bpw-prior")
    assert type(model.model.layers[1].mlp.up_proj) is torch.nn.Linear
    assert storage(model).bits_per_weight <= 6


def test_models_without_a_next_token():
    with pytest.raises(PatchError, match="BertForMaskedLM predicts no next token"):
        hfaccel.patch(tiny("bert"), "auto@5bpw")


def test_matrices_that_share_a_tensor_share_a_width(sensitive):
    sensitive({})
    model = tiny("TL")
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    config = search(model, "auto@4.4bpw")
    hfaccel.patch(model, config)
    first, second = (model.model.layers[i].mlp.up_proj for i in (0, 2))
    assert first.weight is second.weight and storage(model).bits_per_weight <= 4.4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("auto@", "no budget; known are auto@4.5bpw"),
        ("auto@4.5", "no budget"),
        ("auto@bpw", "no budget"),
        ("auto@-3bpw", "no budget"),
        ("auto@4.5bits", "no budget"),
        ("auto@3e2MB", "no budget"),
        ("auto@nanbpw", "no budget"),
        ("auto@٣bpw", "no budget"),
        ("auto@0bpw", "more than nothing"),
        ("auto@0.0MB", "more than nothing"),
        ("auto@4.5bpw-fast", "unknown option -fast; known is -prior"),
        ("auto@4.5bpw-prior-prior", "unknown option"),
        ("auto@4.5bpw+int4", "'int4' beside it would round them again"),
        ("auto@4.5bpw+head8", "'head8' beside it"),
        ("auto@4.5bpw+itn4", "unknown recipe step 'itn4'"),
        ("auto@4.5bpw+", "an empty step"),
    ],
)
def test_budgets_that_are_none(text, words):
    model = tiny("llama")
    for ask in (lambda: hfaccel.patch(model, text), lambda: PatchConfig.from_recipe(text)):
        with pytest.raises(PatchError, match=re.escape(words)):
            ask()
    assert not hasattr(model, "_hfaccel")


@pytest.mark.parametrize(
    ("text", "bits", "size"),
    [
        ("auto@4.5bpw", 4.5, None),
        ("auto@300MB", None, 300_000_000),
        ("auto@300mb", None, 300_000_000),
        ("auto@1.5GiB", None, 3 << 29),
        ("auto@4bpw-prior", 4.0, None),
    ],
)
def test_budgets(text, bits, size):
    found = Budget.parse(text)
    assert (found.bits_per_weight, found.bytes, found.measure) == (bits, size, "prior" not in text)
    assert str(found) == text
    with pytest.raises(PatchError, match="only a model can be asked"):
        PatchConfig.from_recipe(text)


def test_patterns_match_exactly_the_names():
    blocks = [f"model.layers.{i}" for i in range(12)]
    names = [f"{block}.{part}" for block in blocks for part in ("attn.q", "attn.k", "mlp.up")] + ["proj"]
    wanted = [f"model.layers.{i}.attn.q" for i in (0, 1, 11)] + [f"{block}.mlp.up" for block in blocks]
    wanted += ["model.layers.7.attn.k", "proj"]
    found = patterns(wanted, blocks)
    assert len(found) == 4 and sorted(select(names, found)) == sorted(wanted)


def test_from_pretrained_takes_a_budget(tmp_path):
    tiny("TL").save_pretrained(tmp_path)
    model = hfaccel.from_pretrained(tmp_path, "auto@5bpw-prior")
    assert storage(model).bits_per_weight <= 5 and isinstance(model._hfaccel.config.transforms[0], HQQ)
    with pytest.raises(PatchError, match="no budget"):
        hfaccel.from_pretrained(tmp_path / "nowhere", "auto@5")


@pytest.mark.real
@pytest.mark.slow
def test_better_than_uniform_int4_of_as_many_bits():
    """Two windows of the protocol on the off-grid twin; the prior alone, which takes seconds."""
    from functools import partial

    from hfaccel.measure.corpus import text
    from hfaccel.measure.perplexity import perplexity
    from hfaccel.measure.runner_report import paged_logits

    found = {}
    for recipe in ("int4", "auto@5.15bpw-prior"):
        model, tokenizer = hfaccel.demo_model(off_grid=True)
        hfaccel.patch(model, recipe, tokenizer=tokenizer, keep_original=False)
        ours = perplexity(partial(paged_logits, model), tokenizer, text()[:20_000], windows=2)
        found[recipe] = storage(model).bits_per_weight, ours.perplexity
    (bits4, ppl4), (bits, ppl) = found.values()
    assert bits <= bits4 and ppl < ppl4
