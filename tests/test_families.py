"""Every fact of the table of families, checked against what the modules really do in a forward."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import ACT2FN
from transformers.masking_utils import sdpa_mask

from hfaccel.anatomy import anatomy
from tiny import DECODERS, FAMILIES, ids, tiny
from traces import every_case, logits, tensor_of, trace

INTERFACE = [
    f for f in FAMILIES if f != "bloom" and not f.startswith("falcon")
]  # these two compute it themselves


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Waking a second thread costs more than these models do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normalized(x, module, kind):
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    x = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    x = x * (module.weight + 1 if kind == "rms1p" else module.weight)
    return x + module.bias if kind == "layernorm" else x


@every_case
def test_norms(family, fields):
    model = tiny(family, **fields)
    parts = anatomy(model)
    seen, _ = trace(model, ids(2, 12))
    names = [name for block in parts.blocks for name in block.norms.values()]
    names += [n for n in (parts.final_norm, parts.encoder_norm, parts.embeddings.get("norm")) if n]
    assert len(names) >= len(parts.blocks)
    for name in names:
        given, out = seen[name]
        torch.testing.assert_close(out, normalized(given, model.get_submodule(name), parts.facts.norm))


@every_case
def test_residual_stream_from_embedding_to_logits(family, fields):
    model, x = tiny(family, **fields), ids(2, 12)
    parts = anatomy(model)
    facts = parts.facts
    seen, out = trace(model, x)
    embed = {role: model.get_submodule(name) for role, name in parts.embeddings.items()}
    h = embed["tok"].weight[x] * facts.embedding_multiplier
    if "project_in" in embed:
        h = embed["project_in"](h)
    if "pos" in embed:
        h = h + embed["pos"].weight[torch.arange(12) + facts.position_offset]
    if "type" in embed:
        h = h + embed["type"].weight[0]
    h = embed["norm"](h) if "norm" in embed else h
    torch.testing.assert_close(seen[parts.blocks[0].name][0], h)
    for block in parts.blocks:
        norms = {role: seen[name] for role, name in block.norms.items()}
        h, end = seen[block.name]
        o, down = (seen[block.roles[r]][1] if r in block.roles else None for r in ("o", "fc2"))
        if down is None:
            down = seen[block.roles["down"]][1] if "down" in block.roles else seen[f"{block.name}.mlp"][1]
        if "cross_o" in block.roles:
            torch.testing.assert_close(norms["cross_in"][0], h + o)
            o = o + seen[block.roles["cross_o"]][1]
        down = down.reshape(h.shape)
        if facts.placement == "post":
            middle = norms["attn_out"][1].reshape(h.shape)
            torch.testing.assert_close(norms["attn_out"][0], h + o)
            torch.testing.assert_close(norms["mlp_out"][0].reshape(h.shape), middle + down)
            torch.testing.assert_close(end, norms["mlp_out"][1].reshape(h.shape))
        elif facts.placement == "parallel":
            for role in ("attn_in", "mlp_in"):
                assert role not in norms or torch.equal(norms[role][0], h)
            torch.testing.assert_close(end, h + o + down)
        elif facts.placement == "sandwich":
            assert torch.equal(norms["attn_in"][0], h) and torch.equal(norms["attn_out"][0], o)
            torch.testing.assert_close(norms["mlp_in"][0], h + norms["attn_out"][1])
            assert torch.equal(norms["mlp_out"][0], down)
            torch.testing.assert_close(end, norms["mlp_in"][0] + norms["mlp_out"][1])
        else:
            assert torch.equal(norms["attn_in"][0], h)
            start = norms["attn_in"][1] if facts.residual_from_norm else h
            middle = norms["mlp_in"][0].reshape(h.shape)
            torch.testing.assert_close(middle, start + o)
            middle = norms["mlp_in"][1] if facts.residual_from_norm else middle
            torch.testing.assert_close(end, middle + down)
    if family in DECODERS:
        end = seen[parts.final_norm][1] if parts.final_norm else end
        end = model.get_submodule(parts.project_out)(end) if parts.project_out else end
        expected = model.get_submodule(parts.head)(end)
        if facts.final_softcap:
            expected = facts.final_softcap * torch.tanh(expected / facts.final_softcap)
        torch.testing.assert_close(out, expected)


@every_case
def test_mlp(family, fields):
    model = tiny(family, **fields)
    parts = anatomy(model)
    seen, _ = trace(model, ids(2, 12))
    act = ACT2FN[parts.facts.activation] if parts.blocks[-1].mlp != "moe" else None
    for block in parts.blocks:
        outputs = {role: seen[name][1] for role, name in block.roles.items() if name in seen}
        if block.mlp == "plain":
            torch.testing.assert_close(seen[block.roles["fc2"]][0], act(outputs["fc1"]))
        elif block.mlp == "gated" and act:
            gate, up = (
                outputs["gate_up"].chunk(2, -1) if "gate_up" in outputs else (outputs["gate"], outputs["up"])
            )
            torch.testing.assert_close(seen[block.roles["down"]][0], act(gate) * up)
        elif block.mlp == "moe":
            torch.testing.assert_close(
                seen[f"{block.name}.mlp"][1].flatten(0, 1), moe(model, parts, block, seen)
            )


def moe(model, parts, block, seen):
    """The mixture of experts as the facts describe it."""
    facts, experts = parts.facts, model.get_submodule(f"{block.name}.mlp.experts")
    router = model.get_submodule(block.roles["router"])
    x = seen[f"{block.name}.mlp"][0].flatten(0, 1)
    scores = nn.functional.linear(x, router.weight, getattr(router, "bias", None))
    top, chosen = scores.softmax(-1).topk(model.config.num_experts_per_tok)
    top = top / top.sum(-1, keepdim=True) if facts.router_renormalize else top
    w1, w2 = (tensor_of(model, block.roles[f"experts_{role}"]).detach() for role in ("gate_up", "down"))
    if parts.in_axes[block.roles["experts_down"]] == 1:
        w1, w2 = w1.mT, w2.mT
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, e in zip(top[row], chosen[row].tolist(), strict=True):
            h = w1[e] @ x[row]
            if facts.activation == "swiglu_clamped":
                h = h + experts.gate_up_proj_bias[e]
            gate, up = (h[::2], h[1::2]) if facts.gate_up == "interleaved" else h.chunk(2)
            if facts.activation == "swiglu_clamped":
                gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
                h = (
                    w2[e] @ (gate * torch.sigmoid(gate * experts.alpha) * (up + 1))
                    + experts.down_proj_bias[e]
                )
            else:
                h = w2[e] @ (ACT2FN[facts.activation](gate) * up)
            out[row] += weight * h
    return out


@pytest.fixture
def attention_calls():
    """Keyword arguments and shapes of each attention of a model made with `attn="hfaccel_probe"`."""
    calls = []
    plain = AttentionInterface()["sdpa"]

    def probe(module, q, k, v, mask, **kwargs):
        calls.append({**kwargs, "heads": q.shape[1], "kv_heads": k.shape[1], "dim": q.shape[3], "mask": mask})
        return plain(
            module, q, k, v, mask, **{key: kwargs.get(key) for key in ("dropout", "scaling") if key in kwargs}
        )

    AttentionInterface.register("hfaccel_probe", probe)
    AttentionMaskInterface.register("hfaccel_probe", sdpa_mask)
    yield calls
    AttentionInterface._global_mapping.pop("hfaccel_probe")
    AttentionMaskInterface._global_mapping.pop("hfaccel_probe")


@pytest.mark.parametrize("family", INTERFACE)
def test_attention(family, attention_calls):
    model = tiny(family, attn="hfaccel_probe")
    parts = anatomy(model)
    logits(model, ids(2, 20))
    calls = [call for call in attention_calls if call["mask"] is None or call["mask"].shape[-1] == 20]
    if family == "t5":  # two attentions in each decoder layer; the encoder's come first
        calls = calls[:2] + calls[2::2]
    assert len(calls) == len(parts.blocks)
    for block, call in zip(parts.blocks, calls, strict=True):
        assert (call["heads"], call["kv_heads"], call["dim"]) == (block.heads, block.kv_heads, block.head_dim)
        assert call["scaling"] == pytest.approx(
            1.0 if family == "opt" else block.scaling
        )  # OPT scales q itself
        assert call.get("softcap") == parts.facts.attention_softcap
        assert call.get("s_aux") is (model.get_parameter(block.sinks) if block.sinks else None)
        sees = call["mask"][0, 0, -1].sum().item() if call["mask"] is not None else 20
        assert sees == (block.window or 20)


def test_windows():
    assert [b.window for b in anatomy(tiny("mistral")).blocks] == [8, 8]
    assert [b.window for b in anatomy(tiny("gemma3")).blocks] == [8, None]
    assert [b.window for b in anatomy(tiny("llama")).blocks] == [None, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_positions(family):
    model, x = tiny(family), ids(1, 12)
    parts = anatomy(model)
    cosines, alibis = [], []

    def rotary(module, args, output):
        cosines.append(output[0])

    def layer(module, args, kwargs):
        alibis.append(kwargs.get("alibi"))

    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            module.register_forward_hook(rotary)
        if name == parts.blocks[0].name:
            module.register_forward_pre_hook(layer, with_kwargs=True)
    logits(model, x)
    position = parts.facts.position
    assert (alibis[0] is not None) == position.startswith("alibi")
    assert ("pos" in parts.embeddings) == (position == "learned")
    if position == "rotary":  # gpt-oss keeps one half of the cosines, the halves being equal
        assert cosines[0].shape[-1] * (2 if family == "gpt_oss" else 1) == parts.facts.rotary_dim
    else:
        assert parts.facts.rotary_dim == 0


@pytest.mark.parametrize("family", ["bloom", "falcon_alibi"])
def test_alibi_joins_the_scores_where_the_facts_say(family):
    model, x = tiny(family), ids(1, 12)
    parts = anatomy(model)
    block = parts.blocks[0]
    seen, _ = trace(model, x)
    fused = seen[block.roles["qkv"]][1][0]
    q, k, v = (fused[:, rows].view(12, -1, block.head_dim).transpose(0, 1) for rows in parts.qkv_rows(block))
    slopes = 2.0 ** (-8 / block.heads * torch.arange(1, block.heads + 1))
    bias = slopes[:, None, None] * torch.arange(12)
    scores = q @ k.mT * block.scaling
    scores = scores + bias * (block.scaling if parts.facts.position == "alibi_scaled" else 1.0)
    scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    torch.testing.assert_close(seen[block.roles["o"]][0][0], expected)
