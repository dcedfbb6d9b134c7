"""Files that peers read: GGUFs for llama.cpp, folders for the rest; made once, kept in the cache."""

from __future__ import annotations

import os
from pathlib import Path

from hfaccel.demo import cache_dir, demo_folder, demo_gguf
from hfaccel.errors import PatchError
from hfaccel.measure import memory

# Shapes by name, random weights: speed alone.
RANDOM = {"random-1.17b": memory.SHAPE | {"max_position_embeddings": 8192}}


def folder(model: str, *, off_grid: bool = False) -> Path:
    """The folder of a MODEL argument that any loader of transformers' format reads."""
    if model == "demo":
        return demo_folder(off_grid=off_grid)
    if model in RANDOM:
        return _random_folder(model)
    if not Path(model).is_dir():
        raise PatchError(f"{model!r}: peers need a folder, 'demo' or one of {', '.join(RANDOM)}")
    return Path(model)


def _random_folder(name: str) -> Path:
    place = cache_dir() / "bench" / name
    if not (place / "config.json").is_file():
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(LlamaConfig(**RANDOM[name], bos_token_id=1, eos_token_id=2))
        finally:
            torch.set_default_dtype(before)
        partial = place.with_name(f"{name}.{os.getpid()}")
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(partial)
        os.replace(partial, place)
    return place


def gguf_file(model: str, kind: str, *, off_grid: bool = False) -> Path:
    """A llama GGUF of `kind` (Q4_0, Q4_1, Q8_0, F16, BF16): made, or the demo model's own file."""
    if model == "demo" and kind == "Q4_1" and not off_grid:
        return demo_gguf()
    source = folder(model, off_grid=off_grid)
    target = cache_dir() / "bench" / f"{source.name}-{kind}.gguf"
    if not target.is_file():
        _write_gguf(source, target, kind)
    return target


def _write_gguf(source: Path, target: Path, kind: str) -> None:
    import gguf
    import torch
    from gguf import quants
    from transformers import AutoModelForCausalLM

    try:
        wanted = gguf.GGMLQuantizationType[kind]
    except KeyError:
        raise PatchError(f"GGUF type {kind!r}: known are Q4_0, Q4_1, Q8_0, F16, BF16") from None
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = model.config
    if config.model_type != "llama":
        raise PatchError(f"{source}: only llama models are written for the bench, not {config.model_type}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(partial, "llama")
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _copy_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbouring channels
            count = heads if name.endswith("q_proj.weight") else kv
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        array = tensor.contiguous().numpy()
        stem = names.get_name(name.removesuffix(".weight")) + ".weight"
        if tensor.dim() == 1:
            writer.add_tensor(stem, array)
        else:
            writer.add_tensor(stem, quants.quantize(array, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)


def _copy_tokenizer(writer) -> None:
    """The demo model's tokenizer, whose vocabulary all bench models share."""
    import gguf

    reader = gguf.GGUFReader(demo_gguf())
    for key, field in reader.fields.items():
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub)
