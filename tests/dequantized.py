"""The oracle of a patched model: its unpatched twin with the dequantized weights in place of its own."""

import copy

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear
from hfaccel_kernels.layouts import Layout


def rounded(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What a product sees of its input, fp64: symmetric integers, one scale a chunk of a group."""
    if layout.act == "token":
        top = 448 if layout.is_float else 127
        scale = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-300) / top
        if layout.act_scale:
            scale = torch.full_like(scale, layout.act_scale)
        if layout.is_float:
            return scale * (x.double() / scale).to(torch.float8_e4m3fn).double()
        return scale * torch.round(x.double() / scale).clamp(-127, 127)
    top, size = (127, 32) if layout.act_bits == 8 else (127 * 128, 64)
    group = x.shape[-1] if layout.group < 0 else layout.group
    pieces = [piece for part in x.double().split(group, -1) for piece in part.split(size, -1)]
    scales = [piece.abs().amax(-1, keepdim=True).clamp_min(1e-300) / top for piece in pieces]
    return torch.cat(
        [scale * torch.round(piece / scale) for piece, scale in zip(pieces, scales, strict=True)], -1
    )


@torch.no_grad()
def oracle(dense: nn.Module, patched: nn.Module, *, rounds: bool = True) -> nn.Module:
    """A copy of `dense` with the weights that the codes of `patched` stand for.

    rounds: linears also see their inputs rounded, as the kernels do; fused experts do not.
    """
    model = copy.deepcopy(dense)
    for name, module in patched.named_modules():
        if isinstance(module, QuantExperts):
            experts = model.get_submodule(name)
            for key in module.PROJECTIONS:
                weight = module.dequantize(key)
                getattr(experts, key).copy_(weight.mT if experts.is_transposed else weight)
        elif isinstance(module, QuantLinear | QuantEmbedding):
            weight, target = module.dequantize(), model.get_submodule(name)
            weight = weight.T if isinstance(target, Conv1D) else weight
            target.weight = nn.Parameter(weight.to(target.weight.dtype).contiguous())
            if rounds and isinstance(module, QuantLinear):
                target.register_forward_pre_hook(
                    lambda _, args, layout=module.layout: (rounded(args[0], layout).to(args[0].dtype),)
                )
    return model


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative difference of a typical position: the median, since a router may flip at a near tie."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())
