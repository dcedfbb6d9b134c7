"""Which tensor of a GGUF gets which type: the mixtures called Q4_K_M and Q5_K_M, and plain ones.

A file of one type is never that: vectors, routers and position tables stay F32, and of the quantized types
these tensors get more bits, as llama.cpp gives them:

    output (or the embedding where it serves as one)    Q6_K
    attn_v, attn_qkv, ffn_down of K_M                   Q6_K in the first and last eighth of the layers and in
                                                        every third between (falcon's ffn_down: Q5_K there)
    attn_k, attn_v with 8 experts                       Q8_0
    attn_output of Q4_K_M with 8 experts                Q5_K
    attn_v of Q4_K_M, 80 layers of shared key heads     Q5_K where it would be Q4_K (llama 70B, qwen2 72B)
    ffn_down of Q4_0 made with importance               Q4_1 in the first eighth

A type whose block does not divide a row gives way: Q4_K to Q5_0, Q5_K to Q5_1, Q6_K to Q8_0, and what 32 does
not divide to F16.
"""

from __future__ import annotations

import re

from hfaccel.errors import UnknownName
from hfaccel.formats.gguf_encode import BLOCKS

# variant -> type of most matrices, number in general.file_type
VARIANTS = {
    "F32": ("F32", 0),
    "F16": ("F16", 1),
    "BF16": ("BF16", 32),
    "Q8_0": ("Q8_0", 7),
    "Q4_0": ("Q4_0", 2),
    "Q4_1": ("Q4_1", 3),
    "Q5_K_M": ("Q5_K", 17),
    "Q4_K_M": ("Q4_K", 15),
    "Q6_K": ("Q6_K", 18),
}
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_FLOATS = ("F32", "F16", "BF16")
# Small, and read by llama.cpp in fp32.
_KEPT = ("ffn_gate_inp", "position_embd", "token_types")


def variant_named(name: str) -> str:
    """The variant of any spelling. Raises: UnknownName."""
    if (upper := name.upper()) not in VARIANTS:
        raise UnknownName(f"GGUF type {name!r}: known are {', '.join(VARIANTS)}")
    return upper


def tensor_type(
    variant: str,
    name: str,
    shape: tuple[int, ...],
    *,
    architecture: str,
    layers: int,
    experts: int = 0,
    shared_heads: bool = False,
    tied: bool = False,
    weighted: bool = False,
) -> str:
    """The type of one tensor.

    Args:
        name: as in the file, "blk.0.attn_q.weight".
        shape: [..., out, in], as torch has it.
        shared_heads: there are fewer key heads than query heads.
        tied: there is no output tensor.
        weighted: importance is known.
    Returns: a name of `gguf_encode.BLOCKS`.
    """
    stem = name.removesuffix(".weight")
    if len(shape) < 2 or stem == name or stem.endswith("_norm") or stem.rpartition(".")[2] in _KEPT:
        return "F32"
    main, _ = VARIANTS[variant]
    if main in _FLOATS:
        return main
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found is None:
        output = "token_embd" if tied else "output"
        kind = _output(main, architecture, shape[-1]) if stem == output else main
    else:
        layer, role = int(found[1]), found[2].removesuffix("_exps")
        kind = _in_layer(variant, main, role, layer, layers, architecture, experts, weighted)
        if kind == "Q4_K" and role == "attn_v" and _is_70b(architecture, layers, shared_heads):
            kind = "Q5_K"
    return fitting(kind, shape[-1])


def fitting(kind: str, width: int) -> str:
    """The type itself, or what it gives way to in rows of `width`."""
    if width % BLOCKS[kind][0]:
        kind = _FALLBACK.get(kind, "F16")
    return kind if width % BLOCKS[kind][0] == 0 else "F16"


def _output(main: str, architecture: str, width: int) -> str:
    if main == "Q8_0" or architecture == "falcon" or width % BLOCKS[main][0]:
        return "Q8_0"
    return "Q6_K"


def _in_layer(
    variant: str,
    main: str,
    role: str,
    layer: int,
    layers: int,
    architecture: str,
    experts: int,
    weighted: bool,
) -> str:
    medium, falcon, eight = variant.endswith("_M"), architecture == "falcon", experts == 8
    if role in ("attn_v", "attn_k") and eight:
        return "Q8_0"
    if role in ("attn_v", "attn_qkv") and medium and _more(layer, layers):
        return "Q6_K"
    if role == "ffn_down":
        if variant == "Q4_K_M" and falcon:
            return "Q6_K" if layer < layers // 16 else "Q5_K" if _more(layer, layers) else main
        if medium and _more(layer, layers):
            return "Q6_K"
        if variant == "Q4_0" and weighted and layer < layers // 8:
            return "Q4_1"
    if role == "attn_output" and variant == "Q4_K_M" and eight and not falcon:
        return "Q5_K"
    return main


def _is_70b(architecture: str, layers: int, shared_heads: bool) -> bool:
    """Whether attn_v is so much smaller than the other matrices that llama.cpp gives it more bits."""
    return layers == 80 and (architecture == "qwen2" or (architecture == "llama" and shared_heads))


def _more(layer: int, layers: int) -> bool:
    """Whether a layer is among those that llama.cpp gives more bits to."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
