import torch

from hfaccel.formats.importance import input_squares
from tiny import ids, tiny


def inputs_of(model, name, data):
    seen = []
    module = model.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(data)
    handle.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in seen])


def test_mean_squares_of_every_input():
    model, data = tiny("llama"), ids(3, 40)
    found = input_squares(model, data, None, "a test")
    assert len(found) == 2 * 7 + 1
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj", "lm_head"):
        wanted = inputs_of(model, name, data).square().mean(0)
        torch.testing.assert_close(found[f"{name}.weight"], wanted)


def test_conv1d_counts_its_inputs():
    model, data = tiny("gpt2"), ids(3, 40)
    wanted = inputs_of(model, "transformer.h.1.mlp.c_proj", data).square().mean(0)
    found = input_squares(model, data, None, "a test")["transformer.h.1.mlp.c_proj.weight"]
    assert found.shape == (112,)
    torch.testing.assert_close(found, wanted)


def test_experts_each_have_their_own_tokens():
    model, data = tiny("mixtral"), ids(3, 40)
    found = input_squares(model, data, None, "a test")
    gate_up = found["model.layers.0.mlp.experts.gate_up_proj"]
    down = found["model.layers.0.mlp.experts.down_proj"]
    assert gate_up.shape == (4, 64) and down.shape == (4, 112)
    assert not torch.equal(gate_up[0], gate_up[1])
    x = inputs_of(model, "model.layers.0.mlp.experts", data)
    assert gate_up.min() > 0 and gate_up.max() <= x.square().max()
