"""Configs of tiny models as metadata of GGUF files, and back."""

from hfaccel.formats.gguf_config import config_of, metadata_of
from hfaccel.formats.gguf_names import ARCHITECTURES
from tiny import tiny

GEMMA2 = {"query_pre_attn_scalar": 32}
GEMMA3 = GEMMA2 | {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NORMS = {f"blk.{i}.attn_norm.weight" for i in range(6)}


def metadata(family, **config):
    model = tiny(family, **config)
    return metadata_of(ARCHITECTURES[model.config.model_type], model.config)


def read(family, given, *, names=NORMS, rope=None, **changes):
    """`config_of` with some keys changed, of None taken away."""
    row = ARCHITECTURES[{"gemma3": "gemma3_text"}.get(family, family)]
    given = given | {f"{row.gguf}.{key}": value for key, value in changes.items()}
    return config_of(row, {k: v for k, v in given.items() if v is not None}, names, rope or {})
