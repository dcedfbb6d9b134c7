"""Our quantizer of GGUF files beside llama.cpp's, on the same F16 file.

`python -m hfaccel.measure.gguf_quality --peer-python llama.cpp=PATH [--model NAME ...] [--type Q4_K_M]`

Each model is written as F16. From that file's values both make a file of the type, without importance and
with the same one. One reader (the `gguf` package's) decodes all of them into a plain fp32 model, so that
nothing but the quantizers differs, and each is compared with the F16 file's values:

    demo     the demo model's off-grid twin: rows of 576, which 256 does not divide, and of 1,536
    wide     the same function with rows of 768 and 1,536: hidden states turned by a random rotation into
             more channels, heads added to each group by splitting one's output
    random   random weights, rows of 512 and 1,024; text drawn from the model itself, so that a lower
             perplexity is a smaller distance from it

Prints a table, or JSON with --json, and exits with 1 if ours has the higher perplexity or KL anywhere, or is
not better with importance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel.errors import PatchError
from hfaccel.formats import gguf_names, gguf_out
from hfaccel.formats.importance import input_squares
from hfaccel.measure import peers
from hfaccel.measure.corpus import text
from hfaccel.measure.perplexity import Comparison, Reference, cut_windows, evaluating
from hfaccel.samples import CalibrationData

RANDOM = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
# Of matrices: what layers add to a token is less than the token, or the first error would grow without end.
GAINS = {"embed_tokens": 22.6, "o_proj": 0.3, "down_proj": 0.3, "lm_head": 2.5}
WIDE_HIDDEN = 768
CALIBRATION_TOKENS = 16 * 1024


# Models ---------------------------------------------------------------------------------------------------


def load(name: str, windows: int) -> tuple[nn.Module, Any, Tensor, Any]:
    """Model, tokenizer, windows of ids [W, T] and calibration of a model by name."""
    import hfaccel

    if name == "random":
        model = random_model()
        drawn = sampled(model, windows + CALIBRATION_TOKENS // 512, 512)
        return model, None, drawn[:windows], CalibrationData(data=drawn[windows:], tokens=CALIBRATION_TOKENS)
    model, tokenizer = hfaccel.demo_model(off_grid=True)
    if name == "wide":
        model = widened(model)
    ids = cut_windows(tokenizer, text(), windows=windows)
    return model, tokenizer, ids, CalibrationData(data=text("wikitext2_valid"), tokens=CALIBRATION_TOKENS)


def random_model() -> nn.Module:
    """A Llama whose weights are normal, with channels of different sizes, and whose logits have a spread."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**RANDOM)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(torch.exp(0.7 * draw))
            else:
                gain = next((g for part, g in GAINS.items() if part in name), 1.0)
                parameter.copy_(gain * draw / parameter.shape[1] ** 0.5)
    return model


def sampled(model: nn.Module, rows: int, tokens: int) -> Tensor:
    """Rows of ids [rows, tokens] drawn from the model's own distribution."""
    torch.manual_seed(0)
    start = torch.randint(model.config.vocab_size, (rows, 1))
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    with torch.no_grad():
        return model.generate(start, max_new_tokens=tokens - 1, min_new_tokens=tokens - 1, **settings)


def widened(model: nn.Module) -> nn.Module:
    """The same function of the demo model in `WIDE_HIDDEN` channels.

    Norms' weights go into the matrices behind them; then hidden states turn by a matrix R with R^T R = 1, and
    the mean square that norms divide by is that of more channels. One head of each group becomes two, which
    share its output.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    old = model.config
    groups, per = old.num_key_value_heads, old.num_attention_heads // old.num_key_value_heads
    head = old.head_dim
    config = LlamaConfig(
        **{
            key: getattr(old, key)
            for key in ("intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size")
            + ("max_position_embeddings", "rms_norm_eps", "rope_parameters")
            + ("bos_token_id", "eos_token_id", "pad_token_id")
        },
        hidden_size=WIDE_HIDDEN,
        num_attention_heads=groups * (per + 1),
        head_dim=head,
        tie_word_embeddings=False,
    )
    # fp32 norms see less in each channel; their epsilon shrinks with the mean square.
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / WIDE_HIDDEN
    wide = LlamaForCausalLM(config).eval()
    wide.name_or_path = "wide"
    generator = torch.Generator().manual_seed(0)
    square, _ = torch.linalg.qr(
        torch.randn(WIDE_HIDDEN, WIDE_HIDDEN, generator=generator, dtype=torch.float64)
    )
    turn = square[:, : old.hidden_size]  # [wide, old]
    shrink = (old.hidden_size / WIDE_HIDDEN) ** 0.5

    def reads(weight: Tensor, norm: Tensor) -> Tensor:
        return (weight.double() * norm.double() @ turn.t() * shrink).float()

    def writes(weight: Tensor) -> Tensor:
        return (turn @ weight.double()).float()

    shares = torch.tensor([1.0] * (per - 1) + [0.6, 0.4])
    source = torch.tensor([*range(per), per - 1])

    with torch.no_grad():
        for p in wide.parameters():
            if p.dim() == 1:
                p.fill_(1.0)
        wide.model.embed_tokens.weight.copy_(writes(model.model.embed_tokens.weight.t()).t())
        wide.lm_head.weight.copy_(reads(model.lm_head.weight, model.model.norm.weight))
        for a, b in zip(model.model.layers, wide.model.layers, strict=True):
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = reads(getattr(a.self_attn, name).weight, a.input_layernorm.weight)
                if name == "q_proj":
                    weight = weight.view(groups, per, head, -1)[:, source].reshape(-1, WIDE_HIDDEN)
                getattr(b.self_attn, name).weight.copy_(weight)
            out = writes(a.self_attn.o_proj.weight).view(WIDE_HIDDEN, groups, per, head)
            out = out[:, :, source] * shares[:, None]
            b.self_attn.o_proj.weight.copy_(out.reshape(WIDE_HIDDEN, -1))
            for name in ("gate_proj", "up_proj"):
                weight = reads(getattr(a.mlp, name).weight, a.post_attention_layernorm.weight)
                getattr(b.mlp, name).weight.copy_(weight)
            b.mlp.down_proj.weight.copy_(writes(a.mlp.down_proj.weight))
    return wide


# Files ----------------------------------------------------------------------------------------------------


def decode_into(model: nn.Module, file: Path) -> None:
    """Make a plain model's weights those of a file, read by the `gguf` package."""
    import gguf
    from gguf import quants

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    row = gguf_names.architecture_of_model(model.config)
    with torch.no_grad():
        for pair in gguf_names.pairs(row, model.config):
            if (tensor := tensors.pop(pair.gguf, None)) is None:
                continue
            value = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
            if (order := gguf_names.row_order(pair, model.config)) is not None:
                value = value[gguf_names.inverse(order)]
            model.get_parameter(pair.name).copy_(value)
    if tensors:
        raise PatchError(f"{file}: nothing in the model is {', '.join(tensors)}")


def their_file(python: str, spec: dict[str, Any]) -> None:
    """Run llama.cpp's quantizer. Raises: PatchError with the end of what it said."""
    script = Path(peers.__file__).with_name("quantize_llama.py")
    done = subprocess.run([python, str(script), json.dumps(spec)], capture_output=True, text=True)
    if done.returncode:
        raise PatchError(f"llama.cpp's quantizer: {(done.stderr or done.stdout).strip()[-400:]}")


def importance_file(weights: dict[str, Tensor], model: nn.Module, file: Path) -> dict[str, list[int]]:
    """Write importance by our names as numbers; returns GGUF's name -> [first, count]."""
    index, at, parts = {}, 0, []
    if model.config.tie_word_embeddings:
        weights = weights | {"model.embed_tokens.weight": weights["lm_head.weight"]}
    for pair in gguf_names.pairs(gguf_names.architecture_of_model(model.config), model.config):
        if (found := weights.get(pair.name)) is not None:
            index[pair.gguf] = [at, found.numel()]
            parts.append(found.flatten().float())
            at += found.numel()
    torch.cat(parts).numpy().tofile(file)
    return index


# The comparison -------------------------------------------------------------------------------------------


def compare(name: str, kind: str, python: str, windows: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of one model: who, with importance or not, bytes, perplexity, KL, seconds."""
    model, tokenizer, ids, calibration = load(name, windows)
    source = folder / f"{name}-F16.gguf"
    gguf_out.write(model, tokenizer, "F16", source)
    decode_into(model, source)  # what both quantizers start from
    weights = input_squares(model, calibration, tokenizer, kind)
    numbers = folder / f"{name}.f32"
    index = importance_file(weights, model, numbers)
    files, rows = [], []
    for weighted in (False, True):
        for who in ("hfaccel", "llama.cpp"):
            file = folder / f"{name}-{who}-{'weighted' if weighted else 'plain'}.gguf"
            start = time.perf_counter()
            if who == "hfaccel":
                gguf_out.write(model, tokenizer, kind, file, importance=weights if weighted else None)
            else:
                spec = {"source": str(source), "target": str(file), "kind": kind, "threads": 1}
                their_file(python, spec | ({"weights": str(numbers), "index": index} if weighted else {}))
            rows.append({"model": name, "type": kind, "quantizer": who, "weighted": weighted})
            rows[-1] |= {"bytes": file.stat().st_size, "write_s": time.perf_counter() - start}
            files.append(file)
    found = [Comparison() for _ in files]
    with evaluating(model):
        references = [Reference(model(input_ids=row[None], use_cache=False).logits[0], row) for row in ids]
        for file, comparison in zip(files, found, strict=True):
            decode_into(model, file)
            for reference in references:
                logits = model(input_ids=reference.ids[None], use_cache=False).logits[0]
                comparison.add(logits, reference)
    for row, comparison in zip(rows, found, strict=True):
        result = comparison.result(0.0)
        row |= {"perplexity": result.perplexity, "reference": result.reference_perplexity, "kl": result.kl}
        row |= {"tokens": result.tokens, "top1_agreement": result.top1_agreement}
    return rows


def misses(rows: list[dict[str, Any]]) -> list[str]:
    """What does not hold of the rows of one model."""
    by = {(row["quantizer"], row["weighted"]): row for row in rows}
    ours, better = by["hfaccel", False], by["hfaccel", True]
    theirs = by["llama.cpp", False]
    out = []
    for figure in ("perplexity", "kl"):
        if ours[figure] > theirs[figure]:
            out.append(f"{ours['model']}: {figure} {ours[figure]:.5f}, llama.cpp's {theirs[figure]:.5f}")
        limit = min(ours[figure], theirs[figure])
        if better[figure] >= limit:
            out.append(f"{ours['model']}: {figure} {better[figure]:.5f} with importance, without {limit:.5f}")
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True, metavar="llama.cpp=PATH")
    parser.add_argument("--model", nargs="+", default=["demo", "wide", "random"])
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    peer, _, python = args.peer_python.partition("=")
    if peer != "llama.cpp" or not os.access(python, os.X_OK):
        parser.error(
            f"--peer-python {args.peer_python}: llama.cpp=PATH of a python that has llama-cpp-python"
        )
    rows, wrong = [], []
    for name in args.model:
        with tempfile.TemporaryDirectory(prefix="hfaccel-gguf-") as folder:
            found = compare(name, args.type, python, args.windows, Path(folder))
        wrong += misses(found)
        rows += found
        if not args.json:
            for row in found:
                how = "weighted" if row["weighted"] else "plain"
                print(
                    f"{name:7} {row['type']} {row['quantizer']:10} {how:9} {row['bytes']:>11,} bytes  "
                    f"perplexity {row['perplexity']:.4f} (F16 {row['reference']:.4f})  KL {row['kl']:.5f}  "
                    f"top-1 {row['top1_agreement']:.3%}  {row['write_s']:.0f} s",
                    flush=True,
                )
    if args.json:
        print(json.dumps(rows))
    for line in wrong:
        print(f"does not hold: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
