"""Names, roles, groups and feeders, checked against what the modules really do in a forward."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

import hfaccel
from hfaccel.anatomy import anatomy, builtin_ignore, default_sites
from hfaccel.errors import UnsupportedModel
from tiny import DECODERS, FAMILIES, ids, randomize, tiny
from traces import every_case, logits, tensor_of, trace


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Waking a second thread costs more than these models do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def matrices_of_layers(model, parts):
    names = {name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    names |= {name for name, p in model.named_parameters() if p.dim() == 3}
    return {name for name in names if any(name.startswith(f"{block.name}.") for block in parts.blocks)}


# Names ----------------------------------------------------------------------------------------------------


@every_case
def test_every_linear_of_the_layers_has_one_role_and_one_group(family, fields):
    model = tiny(family, **fields)
    parts = anatomy(model)
    layers = model.config.num_hidden_layers
    assert parts.family == model.config.model_type
    assert [b.index for b in parts.blocks] == [*range(layers)] * (2 if family == "t5" else 1)
    assert all(model.get_submodule(b.name) is b.module for b in parts.blocks)
    named = Counter(name for block in parts.blocks for name in block.linears)
    assert named == Counter(matrices_of_layers(model, parts))
    routers = {block.roles["router"] for block in parts.blocks if "router" in block.roles}
    assert Counter(n for g in parts.groups for n in g.readers) == named + Counter(routers)
    for block in parts.blocks:
        assert hasattr(model.get_submodule(block.attention), "layer_idx")
        for name in block.norms.values():
            assert model.get_submodule(name) is not None
    for group in parts.groups:
        for name in group.readers:
            assert tensor_of(model, name).shape[parts.in_axes.get(name, 1)] == group.width, name


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_those_of_the_config(family):
    model = tiny(family)
    text = model.config
    for block in anatomy(model).blocks:
        assert block.heads == text.num_attention_heads
        assert (
            block.head_dim * block.heads
            == tensor_of(model, block.roles["o"]).shape[0 if family == "gpt2" else 1]
        )
    expected = {"falcon": 2, "falcon_mq": 1}.get(family, getattr(text, "num_key_value_heads", block.heads))
    assert block.kv_heads == expected


@pytest.mark.parametrize(
    ("family", "kind", "backbone", "head", "tied"),
    [
        ("llama", "decoder", "model", "lm_head", False),
        ("gemma2", "decoder", "model", "lm_head", True),
        ("gpt2", "decoder", "transformer", "lm_head", True),
        ("opt", "decoder", "model", "lm_head", True),
        ("gpt_neox", "decoder", "gpt_neox", "lm_head", False),
        ("bert", "encoder", "bert", "cls.predictions.decoder", True),
        ("t5", "encoder-decoder", "", "lm_head", True),
    ],
)
def test_kind_backbone_and_head(family, kind, backbone, head, tied):
    model = tiny(family)
    parts = anatomy(model)
    assert (parts.kind, parts.backbone, parts.head, parts.tied) == (kind, backbone, head, tied)
    assert tied == (model.get_submodule(head).weight is model.get_submodule(parts.embeddings["tok"]).weight)


def test_tying_is_read_off_the_tensors_and_not_the_config():
    model = tiny("llama", tie_word_embeddings=True)
    assert anatomy(model).tied
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert model.config.tie_word_embeddings and not anatomy(model).tied


def test_models_without_a_language_head():
    bare = anatomy(tiny("llama", auto=AutoModel))
    assert (bare.backbone, bare.head, bare.tied, bare.blocks[0].name) == ("", None, False, "layers.0")
    classifier = anatomy(AutoModelForSequenceClassification.from_config(tiny("llama").config))
    assert classifier.head is None and classifier.backbone == "model"
    assert "score" in builtin_ignore(classifier) and "score" not in default_sites(classifier)


@pytest.mark.parametrize("family", FAMILIES)
def test_default_sites_are_the_linears_of_the_layers_and_a_decoders_head(family):
    model = tiny(family)
    parts = anatomy(model)
    expected = matrices_of_layers(model, parts) | ({"lm_head"} if family in DECODERS else set())
    assert set(default_sites(parts)) == expected
    left = set(builtin_ignore(parts))
    assert left.isdisjoint(expected) and left | expected == set(parts.matrices)
    assert parts.embeddings["tok"] in left
    assert {block.roles.get("router", parts.embeddings["tok"]) for block in parts.blocks} <= left
    assert not any("norm" in name.lower() or "ln_" in name for name in parts.matrices)


def test_locate():
    parts = anatomy(tiny("mixtral"))
    block, role = parts.locate("model.layers.1.mlp.experts.down_proj")
    assert (block.index, role) == (1, "experts_down")
    assert parts.locate("lm_head") == (None, "head")
    assert parts.locate("model.embed_tokens") == (None, "tok")
    assert parts.locate("model.norm") == (None, "")


# Groups ---------------------------------------------------------------------------------------------------


@every_case
def test_readers_of_a_group_receive_one_tensor_and_a_norm_gives_it(family, fields):
    model = tiny(family, **fields)
    parts = anatomy(model)
    seen, _ = trace(model, ids(2, 12))
    for group in parts.groups:
        given = []
        for name in group.readers:
            block, role = parts.locate(name)
            if role == "experts_down":  # between the matrices of one module: test_experts covers it
                continue
            module = name.rpartition(".")[0] if role == "experts_gate_up" else name
            given.append(seen[module][0].reshape(-1, group.width))
        if group.feeder and group.via == "same":
            given.append(seen[group.feeder][1].reshape(-1, group.width))
        assert all(torch.equal(given[0], other) for other in given[1:]), group


@torch.no_grad()
def fold(model, parts, group, generator, *, readers=True):
    """Divide the feeder's output by random numbers and multiply the readers' columns by them."""
    rows = parts.feeder_rows(group)
    used = rows.unique()
    feeder = tensor_of(model, group.feeder)
    axis = 0 if feeder.dim() == 1 else {0: 1, 1: 0, 2: 1}[parts.in_axes.get(group.feeder, 1)]
    scale = torch.ones(feeder.shape[axis])
    scale[used] = 2 ** (torch.rand(len(used), generator=generator) * 2 - 1)
    module = dict(model.named_modules()).get(group.feeder)
    bias = getattr(module, "bias", None)
    if feeder.dim() == 1 and parts.facts.norm == "rms1p":
        feeder.copy_((1 + feeder) / scale - 1)
    else:
        feeder.div_(scale.view([-1 if dim == axis else 1 for dim in range(feeder.dim())]))
        if bias is not None:
            bias.div_(scale)
    for name in group.readers if readers else ():
        weight, axis = tensor_of(model, name), parts.in_axes.get(name, 1)
        weight.mul_(scale[rows].view([-1 if dim == axis else 1 for dim in range(weight.dim())]))


@every_case
def test_what_a_feeder_divides_its_readers_multiply(family, fields):
    model = tiny(family, **fields)
    x, generator = ids(2, 12), torch.Generator().manual_seed(0)
    parts, before = anatomy(model), logits(model, x)
    folded = copy.deepcopy(model)
    for group in parts.groups:
        if group.feeder:
            fold(folded, parts, group, generator)
            half = copy.deepcopy(model)
            fold(half, parts, group, generator, readers=False)
            assert (logits(half, x) - before).abs().max() > 1e-2, (
                group
            )  # so that the assertion below means something
    assert (logits(folded, x) - before).abs().max() < 1e-4


@every_case
def test_a_feeder_is_missing_only_where_there_is_none(family, fields):
    parts = anatomy(tiny(family, **fields))
    facts = parts.facts
    for group in parts.groups:
        block = parts.blocks[group.block]
        roles = {role for role, name in block.roles.items() if name in group.readers}
        if roles & {"o", "cross_o"}:
            expected = True
        elif roles & {"down", "experts_down", "fc2"}:
            expected = family != "gpt_oss" if block.mlp != "plain" else facts.activation == "relu"
        else:
            expected = facts.placement != "post" and not facts.residual_from_norm and "cross_k" not in roles
        assert bool(group.feeder) == expected, group
    first = parts.groups[0].readers
    assert any("mlp" in name for name in first) == (
        facts.placement == "parallel" and "mlp_in" not in block.norms
    )


@pytest.mark.parametrize(
    "family", [f for f in DECODERS if f in ("phi3", "gpt2", "bloom", "gpt_neox") or "falcon" in f]
)
def test_rows_of_a_fused_qkv(family):
    """q x c and k / c, with one c for each KV head, leave the scores alone; any other split does not."""
    model, x = tiny(family), ids(2, 12)
    parts, before = anatomy(model), logits(model, x)
    with torch.no_grad():
        for block in parts.blocks:
            q, k, v = parts.qkv_rows(block)
            fused = model.get_submodule(block.roles["qkv"])
            assert sorted(torch.cat([q, k, v]).tolist()) == list(
                range(fused.weight.shape[1 if family == "gpt2" else 0])
            )
            scale = torch.ones(q.numel() + k.numel() + v.numel())
            per_head = (
                2 ** torch.linspace(-1, 1, block.kv_heads) if block.kv_heads > 1 else torch.tensor([1.7])
            )
            scale[k] = 1 / per_head.repeat_interleave(block.head_dim)
            scale[q] = per_head.repeat_interleave(q.numel() // block.kv_heads)
            fused.weight.mul_(scale if family == "gpt2" else scale[:, None])
            if fused.bias is not None:
                fused.bias.mul_(scale)
    assert (logits(model, x) - before).abs().max() < 1e-4


# Other models ---------------------------------------------------------------------------------------------


@every_case
def test_structure_alone_finds_the_same_layers(family, fields, monkeypatch):
    model = tiny(family, **fields)
    known = anatomy(model)
    monkeypatch.setattr("hfaccel.anatomy.FAMILIES", {})
    found = anatomy(model)
    assert found.family is None and found.facts is None
    assert [b.name for b in found.blocks] == [b.name for b in known.blocks]
    assert [b.attention for b in found.blocks] == [b.attention for b in known.blocks]
    assert [set(b.linears) for b in found.blocks] == [set(b.linears) for b in known.blocks]
    assert [b.stack for b in found.blocks] == [b.stack for b in known.blocks]
    assert (found.kind, found.head, found.tied) == (known.kind, known.head, known.tied)
    assert set(found.matrices) == set(known.matrices) and found.in_axes == known.in_axes
    assert default_sites(found) and set(default_sites(found)) == set(default_sites(known))
    assert all(group.feeder is None and len(group.readers) == 1 for group in found.groups)


def unknown(model_type, auto=AutoModelForCausalLM, **fields):
    common = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return auto.from_config(AutoConfig.for_model(model_type, **{**common, **fields}))


def test_families_without_a_row():
    olmo = anatomy(unknown("olmo2", intermediate_size=48, num_key_value_heads=2))
    assert olmo.family is None and olmo.kind == "decoder" and olmo.embeddings == {"tok": "model.embed_tokens"}
    assert olmo.blocks[1].roles == {
        **{f"attn.self_attn.{x}_proj": f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"},
        **{f"mlp.mlp.{x}_proj": f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")},
    }
    sizes = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 32, "decoder_attention_heads": 4}
    bart = unknown("bart", encoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, **sizes)
    whole = unknown(
        "bart", AutoModel, encoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, **sizes
    )
    assert anatomy(bart).kind == "decoder" and len(anatomy(bart).blocks) == 3
    parts = anatomy(whole)
    assert parts.kind == "encoder-decoder"
    assert [b.stack for b in parts.blocks] == ["encoder"] * 2 + ["decoder"] * 3
    assert len(parts.blocks[0].linears) == 6 and len(parts.blocks[4].linears) == 10


def test_an_encoder_whose_attention_has_no_number():
    vit = unknown("vit", AutoModel, intermediate_size=48)
    parts = anatomy(vit)
    assert (parts.kind, parts.head, parts.embeddings) == ("encoder", None, {})
    assert set(default_sites(parts)) == matrices_of_layers(vit, parts) and len(parts.blocks) == 2


def test_routers_of_an_unknown_mixture_stay():
    parts = anatomy(
        unknown(
            "qwen2_moe",
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            intermediate_size=48,
        )
    )
    left = builtin_ignore(parts)
    assert "model.layers.0.mlp.gate" in left and "model.layers.0.mlp.shared_expert_gate" in left
    assert "model.layers.0.mlp.experts.gate_up_proj" in default_sites(parts)
    assert "model.layers.0.mlp.shared_expert.up_proj" in default_sites(parts)


def test_a_layer_that_its_row_cannot_explain_is_read_by_structure():
    model = tiny("llama")
    model.model.layers[1].mlp.extra = nn.Linear(64, 64)
    parts = anatomy(model)
    assert parts.family is None and "model.layers.1.mlp.extra" in parts.blocks[1].linears
    assert all(group.feeder is None for group in parts.groups)
    crossed = anatomy(tiny("gpt2", add_cross_attention=True))
    assert crossed.family is None and "transformer.h.0.crossattention.q_attn" in crossed.blocks[0].linears


def test_the_vision_tower_is_not_the_model():
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=5)
    model = Gemma3ForConditionalGeneration(config)
    for table in (None, {}):
        with pytest.MonkeyPatch.context() as patch:
            if table is not None:
                patch.setattr("hfaccel.anatomy.FAMILIES", table)
            parts = anatomy(model)
        assert parts.family == ("gemma3_text" if table is None else None)
        assert [b.name for b in parts.blocks] == [f"model.language_model.layers.{i}" for i in range(2)]
        assert not any("vision" in name for name in default_sites(parts))
        assert any("vision_tower" in name for name in builtin_ignore(parts))
        assert parts.head == "lm_head" and parts.tied


def test_adapters_are_seen_through_and_stop_folding():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["v_proj", "down_proj"], r=2)
    model = peft.get_peft_model(tiny("llama"), config).base_model.model
    parts = anatomy(model)
    assert parts.family == "llama"
    assert parts.blocks[0].roles["v"] == "model.layers.0.self_attn.v_proj.base_layer"
    assert parts.blocks[0].roles["q"] == "model.layers.0.self_attn.q_proj"
    assert not any("lora" in name for name in parts.matrices)
    feeders = [group.feeder for group in parts.groups if group.block == 0]
    assert feeders == [None, None, "model.layers.0.post_attention_layernorm", None]


def test_a_weight_used_twice_is_no_feeder_and_no_reader():
    model = tiny("llama")
    model.model.layers[1].self_attn.v_proj = model.model.layers[0].self_attn.v_proj
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    feeders = [group.feeder for group in anatomy(model).groups if group.block == 0]
    assert feeders == [None, None, None, "model.layers.0.mlp.up_proj"]
    bare = tiny("opt", layer_norm_elementwise_affine=False)
    assert anatomy(bare).groups[0].feeder is None  # a norm without a weight cannot be divided


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral", "gpt_oss", "t5"])
def test_a_patched_model_has_the_same_parts(family):
    model = tiny(family)
    before = anatomy(model)
    hfaccel.patch(model, "int4", progress=False)
    after = anatomy(model)
    for field in ("family", "kind", "backbone", "head", "tied", "blocks", "groups", "facts", "matrices"):
        assert getattr(after, field) == getattr(before, field), field
    assert default_sites(after) == default_sites(before)
    assert after.in_axes == {}  # every packed weight is [out, in]


def test_a_model_on_meta():
    config = tiny("qwen3", tie_word_embeddings=True).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parts = anatomy(model)
    assert parts.tied and parts.blocks[0].kv_heads == 2 and parts.groups[0].feeder


def test_what_has_no_layers_is_refused():
    with pytest.raises(UnsupportedModel, match="Linear is not a transformers model"):
        anatomy(nn.Linear(4, 4))
    with pytest.raises(UnsupportedModel, match="not a transformers model"):
        anatomy("llama")
    resnet = AutoModel.from_config(
        AutoConfig.for_model("resnet", depths=[1, 1], hidden_sizes=[8, 8], embedding_size=8)
    )
    with pytest.raises(UnsupportedModel, match="ResNetModel: no layers found"):
        anatomy(resnet)


def test_tiny_models_repeat_and_have_margins():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for family in FAMILIES:
        first, second, x = tiny(family), tiny(family), ids(2, 24)
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        top = logits(first, x).topk(2).values
        assert (top[..., 0] - top[..., 1] < 1e-3).float().mean() < 0.1, family
        randomize(second, seed=1)
        assert not torch.equal(next(first.parameters()), next(second.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
