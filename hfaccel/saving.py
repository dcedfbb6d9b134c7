"""Writing a folder: `save_pretrained` of a patched model, atomic, with a card that says how to load it.

Files are written into a new folder beside the target, which becomes the target when all of them are there. In
an existing target, which may be a disk of its own, the new folder lies inside and its files are moved up:
config.json is replaced by a note that no loader can read first, and by the new one last. A process that is
killed in the middle leaves the old folder, the new one, or one that is refused, never a mixture.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from hfaccel import compat
from hfaccel.checkpoint import IMPORT_FIRST, WEIGHTS_KEY, SavedConfig
from hfaccel.classes import Mixin
from hfaccel.errors import PatchError

try:
    import fcntl
except ImportError:  # Windows, where nothing is swept
    fcntl = None

_HELD_S = 60.0  # between the making of a folder and its lock nobody takes it for a dead one
CONFIG, CARD, INTERRUPTED = "config.json", "README.md", "interrupted"
_WEIGHTS = r"(model|pytorch_model){variant}(-\d{{5}}-of-\d{{5}})?\.(safetensors|bin)(\.index\.json)?"


class SavingMixin(Mixin):
    """`save_pretrained` of a patched model."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        **kwargs: Any,
    ) -> None:
        """Save the model for `from_pretrained` of hfaccel and, once it is imported, of transformers.

        Takes what `PreTrainedModel.save_pretrained` does; a `state_dict` counts where no weight is packed.
        """
        if not os.fspath(save_directory):
            raise PatchError("save_pretrained: an empty path names no folder")
        target, kwargs["max_shard_size"] = Path(os.path.realpath(save_directory)), max_shard_size
        if not is_main_process or kwargs.get("distributed_checkpoint"):
            return super().save_pretrained(target, is_main_process, state_dict, push_to_hub, **kwargs)
        check_target(target)
        check_offload_source(self, target)
        if (state := getattr(self, "_hfaccel", None)) is not None:
            if state.lent:
                raise PatchError("save_pretrained: inside original(model); leave that block first")
            if state.journal is not None:
                state.journal.keep_files_of(target)
            compat.tell_tying(self)
        with replacing(target, kwargs.get("variant")) as folder:
            super().save_pretrained(folder, state_dict=state_dict, **kwargs)
            if isinstance(getattr(self.config, "quantization_config", None), SavedConfig):
                write_note(folder / CONFIG)
                write_card(folder, target, self)
        if push_to_hub:
            names = ("commit_message", "private", "token", "create_pr", "max_shard_size")
            repository = kwargs.get("repo_id", target.name)
            self.push_to_hub(repository, **{name: kwargs[name] for name in names if name in kwargs})


@contextmanager
def replacing(target: Path, variant: str | None = None) -> Iterator[Path]:
    """A new folder to write files into; afterwards they take the place of those in `target`.

    Other files of `target` stay, but for weights of a former model under other names.
    Raises: OSError naming the target, for a full disk or one that cannot be written.
    """
    name = f".{target.name}.{os.urandom(6).hex()}.saving"
    folder = target / name if target.is_dir() else target.with_name(name)
    _sweep(folder.parent, target.name)
    lock = None
    try:
        folder.mkdir(parents=True)
        lock = _locked(folder)
        yield folder
        if target.is_dir():
            _move_files(folder, target, variant)
        else:
            os.rename(folder, target)
    except (OSError, SafetensorError) as error:
        why = f"{target} cannot be saved: {getattr(error, 'strerror', None) or error}"
        code = getattr(error, "errno", None)
        raise (OSError(why) if code is None else OSError(code, why)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder, which ends with the process; None if another one has it, or where
    folders cannot be held."""
    if fcntl is None:
        return None
    found = None
    try:
        found = os.open(folder, os.O_RDONLY)
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return found
    except OSError:
        if found is not None:
            os.close(found)
        return None


def _sweep(place: Path, name: str) -> None:
    """Remove the folders of savers of `name` that were killed: old enough to be held, and not held."""
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{12}}\.saving")
    for path in place.iterdir() if place.is_dir() else ():
        if not pattern.fullmatch(path.name) or time.time() - path.stat().st_mtime < _HELD_S:
            continue
        if (lock := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def check_target(target: Path) -> None:
    """Refuse what cannot be saved into. Raises: PatchError."""
    if target.exists() and not target.is_dir():
        raise PatchError(f"{target} is a file, not a folder to save into")
    check_writable(target / CONFIG)


def check_free(target: Path) -> None:
    """Refuse a file, or a folder of some, for commands that are not to lose any. Raises: PatchError."""
    if target.is_file():
        raise PatchError(f"{target} is there already; give another name, or --overwrite")
    if target.is_dir() and (held := sorted(path.name for path in target.iterdir())):
        more = f" and {len(held) - 1} more" if held[1:] else ""
        raise PatchError(f"{target} holds {held[0]}{more} already; give another folder, or --overwrite")


def check_writable(file: Path) -> None:
    """Refuse a place where no file can be made, with the folders on the way to it. Raises: PatchError."""
    place = next(parent for parent in file.absolute().parents if parent.exists())
    if not place.is_dir():
        raise PatchError(f"{file} cannot be written: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PatchError(f"{file} cannot be written: no permission to write in {place}")
    try:  # who may write everywhere may not write into /proc
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise PatchError(f"{file} cannot be written: no file can be made in {place}") from error


def _move_files(folder: Path, target: Path, variant: str | None) -> None:
    new = sorted(path.name for path in folder.iterdir())
    stale = re.compile(_WEIGHTS.format(variant=re.escape(f".{variant}") if variant else ""))
    if CONFIG in new:
        # Not removed: a model class whose folder has no config loads random weights of its default sizes.
        (folder / INTERRUPTED).write_text("saving was interrupted: no whole model is here\n", "utf-8")
        os.replace(folder / INTERRUPTED, target / CONFIG)
        for path in target.iterdir():
            if path.name not in new and stale.fullmatch(path.name):
                path.unlink()
    for name in sorted(new, key=lambda name: name == CONFIG):
        os.replace(folder / name, target / name)


def check_offload_source(model: nn.Module, target: Path) -> None:
    """Refuse to write over the files from which offloaded weights are still read."""
    for name, module in model.named_modules():
        for file in compat.offload_files(module):
            if Path(os.path.realpath(file)).parent == target:
                raise PatchError(f"{name}: its weights are offloaded to {target}; save into another folder")


def write_note(file: Path) -> None:
    """Let transformers without hfaccel refuse the folder, by name. An adapter saved alone has no config."""
    if file.exists():
        config = json.loads(file.read_text("utf-8")) | {WEIGHTS_KEY: IMPORT_FIRST}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def write_card(folder: Path, target: Path, model: nn.Module) -> None:
    """The model card; one that is there already gets the section that it lacks."""
    record = model.config.quantization_config
    text = SECTION.format(
        recipe=record.config.describe(),
        version=record.hfaccel_version,
        cls=type(model).__name__,
        name=target.name,
    )
    try:
        before = (target / CARD).read_text("utf-8")
    except FileNotFoundError:
        before = HEADER.format(name=target.name)
    start, end = SECTION.splitlines()[0], SECTION.splitlines()[-1]
    if start in before and end in before:
        before, after = before.partition(start)[0], before.partition(end)[2].lstrip("\n")
    else:
        before, after = f"{before.rstrip()}\n\n", ""
    (folder / CARD).write_text(f"{before}{text}{after}", "utf-8")


HEADER = """---
library_name: transformers
tags:
- hfaccel
---

# {name}
"""

SECTION = """<!-- hfaccel -->
The weights are packed by hfaccel {version} as `{recipe}`. Import it before loading; transformers alone cannot
read them:

```python
import hfaccel
from transformers import {cls}

model = {cls}.from_pretrained("{name}")  # or hfaccel.from_pretrained("{name}")
```
<!-- /hfaccel -->
"""
