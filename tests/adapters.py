"""What the tests of adapters share: models with a LoRA adapter whose B is not zero."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora

from hfaccel_kernels.packing import unpack_rows
from tiny import ids

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model, seed=1, b=0.3, name="default", **config):
    """`model` with an adapter whose B is not zero."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "task_type": "CAUSAL_LM"} | config
    settings = LoraConfig(**settings)
    if isinstance(model, PeftModel):
        model.add_adapter(name, settings)
    else:
        model = get_peft_model(model, settings, adapter_name=name)
    shake(model, name, b)
    return model


def shake(model, name="default", b=0.3):
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f"lora_B.{name}" in key or f"lora_embedding_B.{name}" in key:
                parameter.copy_(b * torch.randn_like(parameter))


def logits(model, x=None, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids(3, 10) if x is None else x, **kwargs).logits


def layers(model):
    return [module for module in model.modules() if isinstance(module, lora.LoraLayer)]


def steps(module):
    """[out, in] the step of each weight's group."""
    scale = unpack_rows(module.weight_scale.float(), module.size[0])
    return scale.repeat_interleave(module.layout.group_len(module.size[1]), 1)[:, : module.size[1]]
