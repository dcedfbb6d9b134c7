"""torch.compile of a patched model: one graph where transformers gives one, equal to eager."""

import pytest
import torch

import hfaccel
from hfaccel import RTN
from tiny import ids, tiny


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(tmp_path / "spill"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward(model, x):
    return model(input_ids=x, use_cache=False).logits


# The backend that only traces: what is tested is the graph, not the code that is generated from it.
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("TL", "int8"),
        ("TL", "int4"),
        ("gpt2", "int8"),  # a tied, packed embedding
        ("gemma3", "int4-sym"),  # one that multiplies
        ("bert", "int8"),
        ("TL", [RTN(bits=3), RTN(bits=4, targets="model.embed_tokens", ignore=())]),
    ],
)
def test_forward_is_one_graph(family, config):
    few = {} if family == "gemma3" else {"num_hidden_layers": 1}
    model = hfaccel.patch(tiny(family, **few), config)
    x = ids(2, 8)
    extra = {} if family == "bert" else {"use_cache": False}

    def call(x):
        return model(input_ids=x, **extra).logits

    with torch.no_grad():
        wanted = call(x)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)
        if config != "int8" or family != "TL":
            return
        other = ids(3, 11, seed=1)  # another shape, which compiles anew
        torch.testing.assert_close(compiled(other), call(other), rtol=1e-4, atol=1e-4)


def test_experts_break_the_graph_as_those_of_transformers_do():
    model = hfaccel.patch(tiny("mixtral", num_hidden_layers=1), "int4")
    with torch.no_grad():
        wanted = forward(model, ids(2, 8))
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(forward(compiled, ids(2, 8)), wanted, rtol=1e-4, atol=1e-4)


def test_gradients_through_the_graph():
    model = hfaccel.patch(tiny("TL", num_hidden_layers=1), "int4")
    table = model.model.embed_tokens.weight
    x = ids(2, 8)
    model(input_ids=x, labels=x, use_cache=False).loss.backward()
    wanted, table.grad = table.grad, None
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(input_ids=x, labels=x, use_cache=False).loss.backward()
    torch.testing.assert_close(table.grad, wanted, rtol=1e-4, atol=1e-5)


def test_a_compiled_wrapper_is_taken_as_its_model():
    model = tiny("TL", num_hidden_layers=1)
    compiled = torch.compile(model, backend="aot_eager")
    x = ids(2, 8)
    with torch.no_grad():
        before = forward(compiled, x)
        assert hfaccel.patch(compiled, "int4") is compiled and hasattr(model, "_hfaccel")
        patched = forward(model, x)
        torch.testing.assert_close(forward(compiled, x), patched, rtol=1e-4, atol=1e-4)
        hfaccel.unpatch(compiled)
        assert not torch.allclose(before, patched)
        torch.testing.assert_close(forward(compiled, x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_generated_code():
    """Through inductor, with the C++ compiler."""
    model = hfaccel.patch(tiny("TL", num_hidden_layers=1), "int8")
    x = ids(2, 8)
    with torch.no_grad():
        wanted = forward(model, x)
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(forward(compiled, x), wanted, rtol=1e-3, atol=1e-3)
