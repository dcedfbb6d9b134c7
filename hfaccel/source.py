"""`from_pretrained`: a model from a folder, a hub id, a `.gguf` file or a folder that hfaccel saved."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from hfaccel.bitsandbytes import translated, without
from hfaccel.checkpoint import FORMAT, METHOD, SavedConfig, parse_transforms
from hfaccel.errors import AlreadyPatched, CheckpointError, PatchError
from hfaccel.recipe import PatchConfig, check_question, is_question
from hfaccel.transform import Stage

_HUB = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


def from_pretrained(
    path_or_id: str | Path,
    recipe: Any = None,
    *,
    dtype: Any = "auto",
    device: Any = None,
    **hf_kwargs: Any,
) -> nn.Module:
    """A model of the class that its config names, in eval mode.

    Args:
        path_or_id: a folder, a hub id, a `.gguf` file (with `gguf_file=` one in a folder or repository), or a
            folder that a patched model saved, which comes back patched. Weights of a `.gguf` file stay packed
            as they are there; for a recipe that changes weights they are dequantized first. Those of GPTQ,
            AWQ and compressed-tensors folders stay packed too, and take recipes of the runtime alone.
        recipe: patch the model with it: a recipe or any other form that `patch` takes. Weights in the dtype
            of their safetensors files are mapped and read one matrix at a time, and what has been packed is
            let go of: memory stays near the packed size.
        dtype: of what is not quantized; "auto" is the checkpoint's.
        device: where the model goes, packed; "cpu" unless said otherwise.
        hf_kwargs: for transformers' `from_pretrained`. A `quantization_config` of bitsandbytes is translated.
    Raises: PatchError and its kinds; OSError for a name that neither a folder nor the hub has.
    """
    if device is not None and hf_kwargs.get("device_map") is not None:
        raise PatchError(f"device={device!r} and device_map={hf_kwargs['device_map']!r}: one of them")
    recipe, skipped = translated(hf_kwargs, recipe)
    check_question(recipe)
    wanted = None if is_question(recipe) else PatchConfig.of(recipe)
    path_or_id = str(path_or_id)
    hub = {key: hf_kwargs[key] for key in _HUB if key in hf_kwargs}
    if (gguf := gguf_path(path_or_id, hf_kwargs.pop("gguf_file", None), hub)) is not None:
        return _from_gguf(gguf, recipe, wanted, skipped, dtype, device, hf_kwargs)
    check_folder(path_or_id, hf_kwargs)
    config = hf_kwargs.get("config") or _config(path_or_id, hub)
    if _may_be_foreign(config, path_or_id):
        from hfaccel.formats.reading import load, method_of

        if (record := method_of(config, path_or_id)) is not None:
            asked = recipe if wanted is None else wanted
            model_class = _model_class(config, hf_kwargs)
            return load(
                path_or_id, config, record, model_class, asked, dtype=dtype, device=device, **hf_kwargs
            )
    stored = stored_patch(config)
    if stored is not None and recipe is not None and wanted != stored and _is_packed(config):
        raise AlreadyPatched(
            f"{path_or_id} is saved as {stored.describe()!r}; give no recipe, or patch the original model"
        )
    if device is not None and recipe is None:
        hf_kwargs["device_map"] = device
    try:
        model = _model_class(config, hf_kwargs).from_pretrained(path_or_id, dtype=dtype, **hf_kwargs)
    except SafetensorError as error:
        raise CheckpointError(f"{path_or_id}: weights are truncated or damaged: {error}") from error
    model.eval()
    if getattr(model, "_hfaccel", None) is None and (recipe is not None or stored is not None):
        if wanted is not None and skipped:
            wanted = without(wanted, skipped, model)
        _patch(model, stored if recipe is None else recipe if wanted is None else wanted, device)
    return model


def _from_gguf(
    path: Path,
    recipe: Any,
    wanted: PatchConfig | None,
    skipped: Any,
    dtype: Any,
    device: Any,
    hf_kwargs: dict[str, Any],
) -> nn.Module:
    """A model of a GGUF file: packed, unless a recipe changes weights."""
    from hfaccel.formats.gguf import GGUFModel

    for name in ("config", "state_dict", "quantization_config"):
        if hf_kwargs.pop(name, None) is not None:
            raise PatchError(f"{name}=: {path.name} says itself what it holds")
    rest = {key: value for key, value in hf_kwargs.items() if key not in _HUB}
    if device is not None and recipe is None:
        rest["device_map"] = device
    packed = recipe is None or changes_no_weights(recipe)
    model = GGUFModel(path).load(packed=packed, dtype=dtype, transforms=wanted if packed else None, **rest)
    if getattr(model, "_hfaccel", None) is None and recipe is not None:
        if wanted is not None and skipped:
            wanted = without(wanted, skipped, model)
        _patch(model, recipe if wanted is None else wanted, device, from_gguf=True)
    elif device is not None:
        model.to(device)
    return model


def changes_no_weights(recipe: Any) -> bool:
    """Whether a recipe, or another form of a config, has steps of adapters and the runtime alone."""
    return not is_question(recipe) and all(
        t.stage >= Stage.ADAPTER for t in PatchConfig.of(recipe).transforms
    )


def _patch(model: nn.Module, config: PatchConfig | str, device: Any, *, from_gguf: bool = False) -> None:
    from hfaccel.journal import Checkpoint
    from hfaccel.patch import patch

    if is_question(config) and device is not None:  # measured where it will run
        model.to(device)
    # Originals that lie in the checkpoint cost nothing to keep; a copy of all of them is not asked for.
    patch(model, config, keep_original=not from_gguf and bool(Checkpoint(model).files))
    if device is not None:
        model.to(device)


def stored_patch(config: Any) -> PatchConfig | None:
    """The patch of a saved folder by its config, packed or of the runtime alone. Raises: CheckpointError."""
    if _is_packed(config):
        return SavedConfig(**config.quantization_config).config
    runtime = getattr(config, "hfaccel", None)
    if runtime is None:
        return None
    if not isinstance(runtime, dict) or set(runtime) - {"executor"} != {"format", "transforms"}:
        raise CheckpointError(
            f"config.json: hfaccel={runtime!r} is not {{'format': ..., 'transforms': [...]}}"
        )
    if not isinstance(runtime["format"], int) or runtime["format"] > FORMAT:
        raise CheckpointError(
            f"config.json: hfaccel is of format {runtime['format']!r}; this version reads up to {FORMAT}"
        )
    return parse_transforms(runtime["transforms"])


def _may_be_foreign(config: Any, path: str) -> bool:
    """Whether another quantizer may have written a folder."""
    if getattr(config, "quantization_config", None) is not None:
        return not _is_packed(config)
    return (Path(path) / "quantize_config.json").is_file()


def _is_packed(config: Any) -> bool:
    quantization = getattr(config, "quantization_config", None)
    return isinstance(quantization, dict) and quantization.get("quant_method") == METHOD


def check_folder(path: str, hf_kwargs: dict[str, Any]) -> None:
    """Refuse, by name, a local folder whose index is damaged or whose shards are not all there."""
    folder = Path(path) / hf_kwargs.get("subfolder", "")
    if not folder.is_dir():
        if Path(path).is_file():
            raise PatchError(f"{path} is a file, and no .gguf: a model is a folder, a hub id or a .gguf file")
        if folder.is_absolute() or path.startswith((".", "~")) or path.endswith("/"):
            raise PatchError(f"{path}: no such folder or .gguf file")
        return  # a hub id
    variant = f".{hf_kwargs['variant']}" if hf_kwargs.get("variant") else ""
    index = folder / f"model.safetensors.index{variant}.json"
    if (folder / f"model{variant}.safetensors").exists() or not index.exists():
        return
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}") from error
    if missing := sorted(name for name in names if not (folder / Path(name).name).is_file()):
        raise CheckpointError(f"{folder / missing[0]} is missing ({len(missing)} of {len(names)} shards)")


def _config(path: str, hub: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, **hub)
    except OSError as error:
        if Path(path).is_dir() and "valid JSON" in str(error):
            raise CheckpointError(f"{Path(path) / 'config.json'} is damaged: {error}") from error
        if Path(path).exists() or "gated repo" in str(error):
            raise
        near = " (did you mean 'demo'?)" if get_close_matches(path, ["demo"]) else ""
        raise OSError(
            f"no model {path!r}{near}: known are a folder, a hub id, a .gguf file and, to the command, "
            f"'demo'; transformers says: {str(error).strip().partition(chr(10))[0]}"
        ) from error


def _model_class(config: Any, hf_kwargs: dict[str, Any]) -> Any:
    import transformers

    remote = getattr(config, "auto_map", None) or {}
    if hf_kwargs.get("trust_remote_code") and (
        name := next((n for n in remote if n.startswith("AutoModel")), None)
    ):
        return getattr(transformers, name)
    for name in config.architectures or ():
        if (found := getattr(transformers, name, None)) is not None:
            return found
    return transformers.AutoModelForCausalLM


def gguf_path(path: str, name: str | None = None, hub: dict[str, Any] | None = None) -> Path | None:
    """The GGUF file that is meant, of a hub's repository downloaded; None if none is.

    Args:
        name: `gguf_file=`, inside a folder or a repository.
        hub: what tells the hub's client where and how, as `from_pretrained` takes it.
    Raises: PatchError for a file that is not there; OSError for what the hub has not.
    """
    if name is None:
        if not path.endswith(".gguf"):
            return None
        place = Path(path).expanduser()
        if place.is_file():
            return place
        if place.is_absolute() or path.startswith((".", "~")) or path.count("/") < 2:
            raise PatchError(f"{path}: no such file")
        path, _, name = path.rpartition("/")
    place = Path(path).expanduser() / name
    if place.is_file():
        return place
    if Path(path).expanduser().is_dir():
        raise PatchError(f"{place}: no such file")
    from transformers.utils import cached_file

    return Path(cached_file(path, name, **{k: v for k, v in (hub or {}).items() if k != "trust_remote_code"}))
