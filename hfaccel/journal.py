"""What `patch` replaced, and where the replaced bits can be read again.

A tensor is journaled before it is freed: as a reference into the checkpoint the model was loaded from, if the bits
there are those in memory, else in a safetensors file of its own under a spill folder. The original module and
parameter objects are kept, emptied (`param.data` of zero elements), so that undoing gives back the same objects.
A journal belongs to one process: a copied or pickled model carries none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hfaccel.errors import PatchError


def digest(tensor: Tensor) -> str:
    """Hash of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy() if flat.numel() else b"", digest_size=16).hexdigest()


@dataclass(frozen=True)
class TensorRef:
    """Bits on disk: one tensor of a safetensors file, with the hash they had when they were journaled."""

    file: str
    key: str
    hash: str

    def read(self, device: torch.device | str = "cpu", *, verify: bool = True) -> Tensor:
        """The tensor, memory-mapped on the CPU. Raises: PatchError if the bits are gone or differ."""
        try:
            with safe_open(self.file, "pt") as file:
                tensor = file.get_tensor(self.key)
        except (OSError, ValueError, RuntimeError) as error:
            raise PatchError(f"the original of {self.key} cannot be read from {self.file}: {error}") from error
        if verify and digest(tensor) != self.hash:
            raise PatchError(f"{self.key} in {self.file} is no longer the tensor that was patched")
        return tensor.to(device)


class Checkpoint:
    """The safetensors files a model came from, by tensor name; empty when it came from nowhere on this disk."""

    def __init__(self, model: nn.Module) -> None:
        folder = Path(str(getattr(model, "name_or_path", "") or ""))
        self.files: dict[str, Path] = {}
        if not str(folder) or not folder.is_dir():
            return
        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                names = json.loads(index.read_text())["weight_map"]
                self.files = {key: folder / Path(name).name for key, name in names.items()}
            elif (single := folder / "model.safetensors").is_file():
                with safe_open(single, "pt") as file:
                    self.files = dict.fromkeys(file.keys(), single)
        except (OSError, ValueError, KeyError, RuntimeError):
            self.files = {}

    def find(self, name: str, tensor: Tensor) -> TensorRef | None:
        """A reference to `tensor` if the file holds the same bits under the same name."""
        file = self.files.get(name)
        if file is None or not file.is_file():
            return None
        try:
            with safe_open(file, "pt") as opened:
                stored = opened.get_tensor(name)
        except (OSError, ValueError, RuntimeError):
            return None
        if stored.dtype != tensor.dtype or stored.shape != tensor.shape:
            return None
        hashed = digest(tensor)
        return TensorRef(str(file), name, hashed) if digest(stored) == hashed else None


class Journal:
    """Everything needed to take a patch back, newest last."""

    def __init__(self, model: nn.Module, keep_original: bool = True) -> None:
        self.keep_original = keep_original
        self.checkpoint = Checkpoint(model) if keep_original else None
        self.swaps: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []  # parent, attribute, old, new
        self.saved: dict[nn.Parameter, tuple[TensorRef, torch.device]] = {}
        self.undos: list[Callable[[], None]] = []
        self._spill: Path | None = None
        self._pending: list[nn.Parameter] = []

    # Recording -----------------------------------------------------------------------------------------------

    def save(self, name: str, parameter: nn.Parameter) -> None:
        """Journal a parameter's bits; its storage may be freed afterwards with `release`."""
        if parameter in self.saved or not self.keep_original:
            return
        ref = self.checkpoint.find(name, parameter) or self._write(name, parameter)
        self.saved[parameter] = (ref, parameter.device)

    def release(self, parameter: nn.Parameter) -> None:
        """Free a journaled parameter's storage; the object stays."""
        parameter.data = parameter.data.new_empty(0)

    def swap(self, parent: nn.Module, attribute: str, new: nn.Module) -> None:
        old = getattr(parent, attribute)
        setattr(parent, attribute, new)
        self.swaps.append((parent, attribute, old, new))
        self.undos.append(lambda: setattr(parent, attribute, old))

    def on_undo(self, undo: Callable[[], None]) -> None:
        self.undos.append(undo)

    def _write(self, name: str, tensor: Tensor) -> TensorRef:
        if self._spill is None:
            root = os.environ.get("HFACCEL_SPILL_DIR") or tempfile.gettempdir()
            try:
                Path(root).mkdir(parents=True, exist_ok=True)
                self._spill = Path(tempfile.mkdtemp(prefix="hfaccel-spill-", dir=root))
            except OSError as error:
                raise PatchError(f"HFACCEL_SPILL_DIR={root}: cannot be written: {error}") from error
            weakref.finalize(self, shutil.rmtree, str(self._spill), ignore_errors=True)
        need, free = tensor.numel() * tensor.element_size(), shutil.disk_usage(self._spill).free
        if need > free:
            raise PatchError(
                f"keeping the original of {name} needs {need:,} bytes under {self._spill.parent}, {free:,} are free: "
                f"set HFACCEL_SPILL_DIR to a larger disk or pass keep_original=False"
            )
        file = self._spill / f"{len(self.saved):05d}.safetensors"
        plain = tensor.detach().cpu().contiguous()
        save_file({name: plain}, file)
        return TensorRef(str(file), name, digest(plain))

    # Undoing -------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put every module and tensor back, newest first. Reads all tensors before it changes any module."""
        if not self.keep_original and self.swaps:
            raise PatchError("the originals were not kept (keep_original=False): load the model again instead")
        emptied = {p: self.saved[p] for p in self.saved if p.numel() == 0}
        bits = {parameter: ref.read(device) for parameter, (ref, device) in emptied.items()}
        for parameter, tensor in bits.items():
            # A clone: the file may be a spill file that goes away, or be rewritten under the map.
            parameter.data = tensor.clone()
        self.rollback()

    def rollback(self) -> None:
        """Undo every change, newest first; tensors freed by a patch that failed are read back."""
        for parameter, (ref, device) in self.saved.items():
            if parameter.numel() == 0:
                parameter.data = ref.read(device).clone()
        for undo in reversed(self.undos):
            undo()
        self.close()

    def borrow(self) -> Callable[[], None]:
        """Show the originals (memory-mapped) in place of the patched modules; the result puts those back."""
        if not self.keep_original and self.swaps:
            raise PatchError("the originals were not kept (keep_original=False): there is nothing to compare with")
        emptied = [p for p in self.saved if p.numel() == 0]
        mapped = {p: self.saved[p][0].read(self.saved[p][1], verify=False) for p in emptied}
        for parameter, tensor in mapped.items():
            parameter.data = tensor
        for parent, attribute, old, _ in reversed(self.swaps):
            setattr(parent, attribute, old)

        def give_back() -> None:
            for parent, attribute, _, new in self.swaps:
                setattr(parent, attribute, new)
            for parameter in emptied:
                self.release(parameter)

        return give_back

    def close(self) -> None:
        """Forget everything and remove the spill files."""
        self.swaps, self.saved, self.undos = [], {}, []
        if self._spill is not None:
            shutil.rmtree(self._spill, ignore_errors=True)
            self._spill = None
