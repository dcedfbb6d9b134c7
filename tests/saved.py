"""What the tests of saving and loading share: every rounding recipe, logits, reload, files."""

import json
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

import hfaccel
from hfaccel.attention.backend import NAMES
from hfaccel.quant.head import Head
from hfaccel.registry import all_transforms
from tiny import ids

transformers.utils.logging.disable_progress_bar()

# A recipe for each width of every method that changes stored codes: new methods join by being registered.
ROUNDING = [
    step for cls in all_transforms().values() if cls.rounds and cls is not Head for step, _ in cls.steps
]


def patched(model, config, **kwargs):
    """`model` patched, with data at hand for the methods that want it."""
    data = [ids(1, length, seed=length) for length in (7, 12, 16)]
    return hfaccel.patch(model, config, calibration=data, progress=False, **kwargs)


@torch.no_grad()
def logits(model, batch: int = 2, length: int = 12) -> torch.Tensor:
    """Of the same random ids for every model, decoder inputs included."""
    x = ids(batch, length)
    extra = {"decoder_input_ids": x} if model.config.is_encoder_decoder else {}
    return model(input_ids=x, **extra).logits


def attention(model) -> dict[str, str]:
    """The argument of `from_pretrained` that gives the attention the model had before its patch."""
    now = model.config._attn_implementation
    return {"attn_implementation": next((plain for plain, ours in NAMES.items() if ours == now), now)}


def reload(model, folder, **kwargs):
    """The folder through the model's own class and attention; every key must be there and none left over."""
    cls = getattr(transformers, type(model).__name__)
    loaded, info = cls.from_pretrained(folder, output_loading_info=True, **attention(model), **kwargs)
    assert not any(info.values()), info
    return loaded


def stored(folder) -> dict[str, torch.Tensor]:
    """Every tensor in the folder's safetensors files, by name."""
    out = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():
                assert key not in out
                out[key] = opened.get_tensor(key)
    return out


def config_json(folder) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())
