"""What the tests of a patch share: everything about a model as it was, logits, names of what is packed."""

import torch
from torch import nn

from hfaccel.quant.linear import is_packed
from tiny import ids, tiny


def logits(model, x=None):
    x = ids(3, 12) if x is None else x
    extra = {"decoder_input_ids": x[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=x, **extra).logits


class Snapshot:
    """Everything about a model that a patch taken back must leave as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.cls = type(model)
        self.attributes = {key: vars(model)[key] for key in vars(model) if not key.startswith("_")}
        self.names = set(vars(model))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.classes = {name: type(module) for name, module in self.modules.items()}
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.state = {key: value.clone() for key, value in model.state_dict().items()}
        self.grads = {key: p.requires_grad for key, p in self.parameters.items()}
        self.configs = {name: vars(module).get("config") for name, module in self.modules.items()}
        self.config = model.config.to_dict()
        self.attention = model.config._attn_implementation
        self.logits = logits(model)

    def check(self) -> None:
        model = self.model
        assert type(model) is self.cls
        assert {k: v for k, v in vars(model).items() if not k.startswith("_")} == self.attributes
        assert vars(model).keys() == self.names
        modules = dict(model.named_modules(remove_duplicate=False))
        assert modules.keys() == self.modules.keys()
        assert all(modules[name] is module for name, module in self.modules.items())
        assert {name: type(module) for name, module in modules.items()} == self.classes
        parameters = dict(model.named_parameters(remove_duplicate=False))
        assert parameters.keys() == self.parameters.keys()
        assert all(parameters[name] is p for name, p in self.parameters.items())
        assert {name: p.requires_grad for name, p in parameters.items()} == self.grads
        state = model.state_dict()
        assert state.keys() == self.state.keys()
        for key, value in self.state.items():
            assert state[key].dtype == value.dtype and torch.equal(state[key], value), key
        assert all(vars(modules[name]).get("config") is c for name, c in self.configs.items())
        assert model.config.to_dict() == self.config
        assert model.config._attn_implementation == self.attention
        assert torch.equal(logits(model), self.logits)


def tied(**fields):
    return tiny("TL", tie_word_embeddings=True, **fields)


def names_of(model, kind=nn.Module):
    return {name for name, module in model.named_modules() if is_packed(module) and isinstance(module, kind)}
