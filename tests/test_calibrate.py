"""Samples of every form, padding that never counts, block after block as the changed model has it."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hfaccel
from hfaccel import CalibrationData, PatchError
from hfaccel.anatomy import anatomy
from hfaccel.calibrate import BlockLoop
from hfaccel.observers import Want
from hfaccel.quant.gptq import GPTQ
from hfaccel.quant.linear import is_packed
from hfaccel.recipe import PatchConfig
from hfaccel.samples import calibration_data, read_samples
from hfaccel.sites import Plan
from saved import logits
from tiny import FAMILIES, ids, tiny

LENGTHS = (3, 9, 17, 24, 31, 40, 52, 60)


def rows(vocab: int = 512) -> list[torch.Tensor]:
    return [ids(1, length, seed=length, vocab=vocab)[0] for length in LENGTHS]


def padded(rows: list[torch.Tensor], side: str, pad: int = 0) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    out = {"input_ids": torch.full((len(rows), width), pad), "attention_mask": torch.zeros(len(rows), width)}
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(len(row))
        out["input_ids"][i, at], out["attention_mask"][i, at] = row, 1
    return out


def loop_over(model, samples, want=None, recipe="gptq4+head16", **kwargs):
    plan = Plan.of(model, PatchConfig.from_recipe(recipe))
    want = want or Want(hessian=True)
    sites = [(site, want) for _, sites in plan.work for site in sites]
    return BlockLoop(model, plan.anatomy, samples, sites, **kwargs)


def stats_of(model, samples, want=None, **kwargs):
    return {
        name: each for _, stats in loop_over(model, samples, want, **kwargs) for name, each in stats.items()
    }


@torch.no_grad()
def inputs_of(model, names, samples):
    """Every input of the named linears in one plain forward a sample, [tokens, K]: the oracle."""
    seen = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: seen[name].append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for name in names
    ]
    for sample in samples:
        extra = {"decoder_input_ids": sample[None]} if model.config.is_encoder_decoder else {}
        model(input_ids=sample[None], **extra)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts).double() for name, parts in seen.items()}


# Statistics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_those_of_a_plain_forward(family):
    model = tiny(family)
    samples = [ids(1, length, seed=length)[0] for length in (5, 11, 16)]
    found = stats_of(model, samples, Want(hessian=True, channels=True))
    names = [name for name in found if isinstance(model.get_submodule(name), nn.Module)]
    names = [name for name in names if not hasattr(model.get_submodule(name), "gate_up_proj")]
    assert len(names) >= 4
    for name, x in inputs_of(model, names, samples).items():
        (stats,) = found[name]
        assert stats.tokens == len(x) == 32, name
        h = x.t() @ x / len(x)
        tolerance = {"rtol": 1e-4, "atol": 1e-5 * float(h.diagonal().max())}
        assert torch.allclose(stats.hessian.double(), h, **tolerance), name
        assert torch.equal(stats.hessian, stats.hessian.t())
        for value, wanted in (
            (stats.abs_max, x.abs().amax(0)),
            (stats.abs_mean, x.abs().mean(0)),
            (stats.square_mean, x.square().mean(0)),
        ):
            assert torch.allclose(value.double(), wanted, rtol=1e-4, atol=1e-5), name


def test_later_blocks_see_what_earlier_ones_became():
    model, samples = tiny("TL"), rows()
    changed = tiny("TL")

    def change(block):
        block.mlp.down_proj.weight.data.mul_(1.5)
        block.self_attn.v_proj.weight.data.add_(0.02)

    found = {}
    for index, stats in loop_over(model, samples):
        found |= stats
        if index is not None:
            change(model.model.layers[index])
    for index, layer in enumerate(changed.model.layers):
        name = f"model.layers.{index}.mlp.down_proj"
        x = inputs_of(changed, [name], samples)[name]  # of a model that is changed up to this block
        h = x.t() @ x / len(x)
        assert torch.allclose(found[name][0].hessian.double(), h, rtol=1e-4, atol=1e-5 * float(h.max())), (
            index
        )
        change(layer)


def test_blocks_without_targets_are_passed_through():
    model, samples = tiny("TL"), rows()
    want = [(site, Want(hessian=True)) for site in _sites(model, "model.layers.3.*.o_proj", "lm_head")]
    loop = BlockLoop(model, anatomy(model), samples, want)
    steps = list(loop)
    assert [index for index, _ in steps] == [3, None] and loop.passes == 2
    found = {name: each for _, stats in steps for name, each in stats.items()}
    for name, x in inputs_of(model, list(found), samples).items():
        h = x.t() @ x / len(x)
        assert torch.allclose(found[name][0].hessian.double(), h, rtol=1e-4, atol=1e-5 * float(h.max()))


def _sites(model, *targets):
    config = PatchConfig.of(GPTQ(targets=targets))
    return [site for transform, sites in Plan.of(model, config).work for site in sites]


def test_rows_are_spread_over_all_samples():
    model, samples = tiny("TL"), rows()
    found = stats_of(model, samples, Want(rows=40))
    name = "model.layers.1.self_attn.o_proj"
    x = inputs_of(model, [name], samples)[name].float()
    stride = -(-len(x) // 40)
    assert torch.allclose(found[name][0].rows, x[::stride], atol=1e-5)


def test_samples_take_turns_where_there_are_many():
    model = tiny("TL")
    samples = [ids(1, 20, seed=seed, vocab=512)[0] for seed in range(8)]
    found = stats_of(model, samples, capture_tokens=40)
    assert {each[0].tokens for each in found.values()} == {40}
    for index in range(4):
        name = f"model.layers.{index}.mlp.down_proj"
        mine = [sample for s, sample in enumerate(samples) if s % 4 == index % 4]
        x = inputs_of(model, [name], mine)[name]
        h = x.t() @ x / len(x)
        assert torch.allclose(found[name][0].hessian.double(), h, rtol=1e-4, atol=1e-5 * float(h.max()))


def test_linears_that_read_one_tensor_share_their_statistics():
    found = stats_of(tiny("TL"), rows())
    at = "model.layers.0.self_attn."
    assert found[at + "q_proj"][0] is found[at + "v_proj"][0]
    assert found[at + "q_proj"][0] is not found[at + "o_proj"][0]


def test_activations_in_files_give_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(tmp_path))
    inside, during = stats_of(tiny("TL"), rows(), spill=False), []
    loop = loop_over(tiny("TL"), rows(), spill=True)
    outside = {}
    for _, stats in loop:
        outside |= stats
        during.append(sum(file.stat().st_size for file in tmp_path.rglob("decoder-*")))
    assert max(during) == 4 * 64 * sum(LENGTHS)
    assert not list(tmp_path.iterdir())
    for name, (stats,) in inside.items():
        assert torch.equal(stats.hessian, outside[name][0].hessian), name


@pytest.mark.parametrize("family", ["TL", "t5", "bert"])
def test_the_model_is_as_it_was_after_the_loop_and_after_an_interrupt(family):
    model = tiny(family)
    model.train()
    frozen = [name for name, module in model.named_modules() if name.endswith("norm") or "LayerNorm" in name]
    for name in frozen:
        model.get_submodule(name).eval()
    before = {name: module.training for name, module in model.named_modules()}
    samples = [ids(1, length, seed=length)[0] for length in (7, 30)]
    list(loop_over(model, samples))
    loop = iter(loop_over(model, samples))
    next(loop), next(loop)
    loop.close()
    broken = iter(loop_over(model, samples))
    next(broken)
    handle = _interrupt(model, anatomy(model).blocks[0].module)
    with pytest.raises(KeyboardInterrupt):
        next(broken)
    handle.remove()
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def _interrupt(model, module):
    def stop(*args):
        raise KeyboardInterrupt

    return next(m for m in module.modules() if isinstance(m, nn.Linear)).register_forward_hook(stop)


# Samples -------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer: one word, one id; sequences begin with 1."""

    bos_token_id, eos_token_id, unk_token_id, pad_token_id, cls_token_id = 1, 2, None, 0, None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        found = [3 + len(word) for word in text.split()]
        return {"input_ids": [1] * add_special_tokens + found}

    def apply_chat_template(self, messages, tokenize=False):
        return " ".join(message["content"] for message in messages)


TEXTS = [" ".join("a" * (1 + i % 7) for i in range(n)) for n in (20, 33)]
EXPECTED = sorted(([1] + [4 + i % 7 for i in range(n)] for n in (20, 33)), key=len)


def read(data, **settings):
    tokenizer = settings.pop("tokenizer", Words())
    data = data if isinstance(data, CalibrationData) else CalibrationData(data=data, **settings)
    return [row.tolist() for row in read_samples(data, tiny("TL"), tokenizer)]


def test_texts_in_every_container():
    for data in (TEXTS, tuple(TEXTS), iter(TEXTS), (t for t in TEXTS), [{"text": t} for t in TEXTS]):
        assert read(data) == EXPECTED
    assert read([{"prompt": t, "n": 3} for t in TEXTS]) == EXPECTED
    chats = [{"messages": [{"role": "user", "content": t}]} for t in TEXTS]
    assert [row[-5:] for row in read(chats)] == [row[-5:] for row in EXPECTED]
    assert read([*TEXTS, "", "  \n"]) == EXPECTED
    assert read(TEXTS[0] + " " + TEXTS[0]) == [[1] + 2 * EXPECTED[0][1:]]


def test_a_dataset_of_the_library():
    datasets = pytest.importorskip("datasets")
    assert read(datasets.Dataset.from_dict({"text": TEXTS})) == EXPECTED
    ids = datasets.Dataset.from_dict(
        {"input_ids": EXPECTED, "attention_mask": [[1] * len(r) for r in EXPECTED]}
    )
    assert read(ids) == EXPECTED


def test_ids_in_every_form():
    wanted = sorted((row.tolist() for row in rows()), key=len)
    left, right = padded(rows(), "left"), padded(rows(), "right")
    bare = left["input_ids"], right["input_ids"]  # pads at the ends are found without a mask
    loader = DataLoader(TensorDataset(*right.values()), batch_size=3)
    dicts = DataLoader([{k: v[i] for k, v in left.items()} for i in range(8)], batch_size=4)
    each = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in rows()]
    forms = (rows(), rows()[::-1], [r.tolist() for r in rows()], left, right, *bare, loader, dicts, each)
    for data in (*forms, {"input_ids": [r.tolist() for r in rows()]}, [row[None] for row in rows()]):
        assert read(data, tokenizer=None) == wanted


def test_ids_with_labels_beside_them():
    batch = torch.stack([ids(1, 20, seed=s)[0] for s in range(2)])
    assert read((batch, batch.clone()), tokenizer=None) == sorted(batch.tolist())
    assert read([(batch, batch - 200)], tokenizer=None) == sorted(batch.tolist())


def test_long_rows_are_cut_and_the_rest_is_named(caplog):
    found = read([" ".join(["aa"] * 200)], window_tokens=50)
    assert [len(row) for row in found] == [4 + 1, 50, 50, 50, 50] and all(row[0] == 1 for row in found)
    assert sum(map(len, read([torch.arange(2, 400)], tokens=100, window_tokens=30))) == 100
    assert "first 100 tokens are used" in caplog.text
    model = tiny("TL", max_position_embeddings=40)
    assert {len(row) for row in read_samples(CalibrationData(data=[torch.arange(2, 82)]), model)} == {40}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "0 tokens in 0 samples"),
        ("", "0 tokens in 0 samples"),
        ([torch.tensor([5, 6, 7]), torch.tensor([8])], "4 tokens in 2 samples; at least 32"),
        (padded([torch.tensor([5, 6])] * 20, "left") | {"attention_mask": torch.zeros(20, 2)}, "0 tokens"),
        ([torch.randn(40)], "token ids are integers"),
        ([torch.full((40,), 512)], "token id 512 is not in 0 .. 511"),
        ([torch.full((40,), -1)], "token id -1 is not in"),
        (3.5, "float is neither text, token ids"),
        ([{"a": 1, "b": 2}], "columns are a, b"),
        (torch.zeros(2, 3, 4, dtype=torch.int64), r"\[2, 3, 4\]"),
    ],
)
def test_data_that_is_refused_before_anything_changes(data, message):
    model = tiny("TL")
    with pytest.raises(PatchError, match=message):
        hfaccel.patch(model, "gptq4", calibration=data, progress=False)
    assert not any(map(is_packed, model.modules())) and not hasattr(model, "_hfaccel")


def test_texts_without_a_tokenizer_and_nothing_at_all_are_refused():
    with pytest.raises(PatchError, match="texts need tokenizer="):
        hfaccel.patch(tiny("TL"), "gptq4", calibration=["a text"])
    with pytest.raises(PatchError, match="gptq4-sym needs data"):
        hfaccel.patch(tiny("TL"), "gptq4-sym")
    with pytest.raises(PatchError, match="window_tokens=0"):
        CalibrationData(data=[], window_tokens=0)


def test_without_data_the_shipped_text_is_used(caplog):
    settings, _ = calibration_data(None, tiny("TL"), Words(), "gptq4")
    assert settings.data.startswith(" \n = Homarus gammarus =") and "wikitext2_valid is used" in caplog.text


def test_methods_without_an_observer_read_no_data():
    hfaccel.patch(tiny("TL"), "int4", calibration=3.5, progress=False)


# C1: padding and batching --------------------------------------------------------------------------------


def codes(model):
    return {name: t for name, t in model.state_dict().items() if name.rpartition(".")[2].startswith("weight")}


def test_c1_batching_padding_and_order_change_nothing():
    def made(data):
        model = tiny("TL")
        model.model.embed_tokens.weight.data[0] *= 100  # the pad token, were it to count
        hfaccel.patch(model, "gptq4", calibration=data, progress=False)
        return codes(model)

    wanted = made(rows())
    for data in (padded(rows(), "left"), padded(rows(), "right"), rows()[::-1]):
        found = made(data)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_c1_every_sample_counts():
    wanted = stats_of(tiny("TL"), rows())
    assert all(each[0].tokens == sum(LENGTHS) for each in wanted.values())
    for index in range(len(LENGTHS)):
        other = copy.copy(rows())
        other[index] = ids(1, LENGTHS[index], seed=99, vocab=512)[0]
        found = stats_of(tiny("TL"), other)
        for name, (stats,) in found.items():
            assert not torch.equal(stats.hessian, wanted[name][0].hessian), (index, name)


# Failures in the middle ----------------------------------------------------------------------------------


def test_activations_that_are_not_finite_are_refused_by_name_and_count():
    model = tiny("TL")
    model.model.embed_tokens.weight.data[7] = float("nan")
    data = [ids(1, 40, vocab=512)[0] for _ in range(3)]
    data[1][:5] = 7
    data[0][data[0] == 7] = 8
    bad = sum(int((row == 7).sum()) for row in data)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        PatchError, match=r"layers.0.self_attn.q_proj: \d+ of 120 calibration tokens have NaN"
    ):
        hfaccel.patch(model, "gptq4", calibration=data, progress=False)
    assert bad >= 5
    assert not any(map(is_packed, model.modules()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name


@pytest.mark.parametrize("block", [0, 2, 3])
def test_an_interrupt_in_the_middle_leaves_the_model_untouched(block, monkeypatch):
    model = tiny("TL")
    wanted, before = logits(model), {name: module for name, module in model.named_modules()}
    apply = GPTQ.apply

    def interrupted(self, site, stats):
        if site.block == block and site.role == "up":
            raise KeyboardInterrupt
        return apply(self, site, stats)

    monkeypatch.setattr(GPTQ, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hfaccel.patch(model, "gptq4", calibration=rows(), progress=False)
    assert dict(model.named_modules()) == before and torch.equal(logits(model), wanted)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    monkeypatch.undo()
    hfaccel.patch(model, "gptq4", calibration=rows(), progress=False)  # and can be patched afterwards
    other = tiny("TL")
    hfaccel.patch(other, "gptq4", calibration=rows(), progress=False)
    assert torch.equal(logits(model), logits(other))
    hfaccel.unpatch(model)
    assert torch.equal(logits(model), wanted)


def test_progress_counts_every_sample_of_every_pass():
    steps = []
    loop = loop_over(tiny("TL"), rows(), advance=lambda n=1: steps.append(n))
    list(loop)
    assert sum(steps) == loop.passes * len(LENGTHS) == 4 * len(LENGTHS)


def test_one_copy_of_the_loop():
    """No other file runs a model over calibration samples to observe it; the search of a budget replays
    blocks on them, to compare what comes out, and the importance of inputs is seen in whole forwards."""
    sources = Path(hfaccel.__file__).parent.rglob("*.py")
    holding = [file.name for file in sources if "read_samples(" in file.read_text("utf-8")]
    assert sorted(holding) == ["importance.py", "samples.py", "search.py", "swap.py"]
