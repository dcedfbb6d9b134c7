"""What `patch` replaced, and where the replaced bits can be read again.

A tensor is journaled before it is freed: as a reference into the checkpoint the model was loaded from, if
the bits there are those in memory, else in a safetensors file of its own under a spill folder. The original
module and parameter objects are kept, emptied (`param.data` of zero elements): undoing gives back the same
objects. A journal belongs to one process, a copied or pickled model has none, and it refers to no model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hfaccel import compat
from hfaccel.errors import PatchError
from hfaccel.mapped import drop_pages

_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


def raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, uint8, on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.blake2b(raw(tensor).numpy(), digest_size=16).hexdigest()


def _signature(file: str) -> tuple[int, int, int]:
    """What changes when a file is written to or replaced."""
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class TensorRef:
    """One tensor of a safetensors file, with its hash and the file's state when it was journaled."""

    file: str
    key: str
    hash: str
    signature: tuple[int, int, int]

    def read(self, *, verify: bool = True) -> Tensor:
        """The tensor, memory-mapped; without `verify` its bits are hashed only if the file changed.

        Raises: PatchError if the bits are gone or differ.
        """
        try:
            changed = _signature(self.file) != self.signature
            with safe_open(self.file, "pt") as file:
                tensor = file.get_tensor(self.key)
        except _UNREADABLE as error:
            raise PatchError(
                f"the original of {self.key} cannot be read from {self.file}: {error}"
            ) from error
        if (verify or changed) and digest(tensor) != self.hash:
            raise PatchError(f"{self.key} in {self.file} is no longer the tensor that was patched")
        return tensor


@dataclass(frozen=True)
class Held:
    """Bits in memory, until the patch is through: for models whose originals are not kept."""

    tensor: Tensor

    def read(self, *, verify: bool = True) -> Tensor:
        return self.tensor


class Checkpoint:
    """The safetensors files a model came from, by tensor name; none if it came from nowhere on this disk."""

    def __init__(self, model: nn.Module) -> None:
        self.prefix = getattr(model, "base_model_prefix", "")
        self.files: dict[str, str] = {}
        place = str(getattr(model, "name_or_path", "") or "")
        try:
            if (index := compat.checkpoint_file(model, place, "model.safetensors.index.json")) is not None:
                names = json.loads(Path(index).read_text())["weight_map"]
                found = {
                    key: compat.checkpoint_file(model, place, Path(name).name) for key, name in names.items()
                }
                self.files = {key: file for key, file in found.items() if file is not None}
            elif (single := compat.checkpoint_file(model, place, "model.safetensors")) is not None:
                with safe_open(single, "pt") as file:
                    self.files = dict.fromkeys(file.keys(), single)
        except _UNREADABLE:
            self.files = {}

    def _keys(self, name: str) -> list[str]:
        """Names under which the file may have what the model calls `name`."""
        name = compat.plain_name(name)
        names = (name, name.removeprefix(f"{self.prefix}."), f"{self.prefix}.{name}")
        return [key for key in dict.fromkeys(names) if key in self.files]

    def may_have(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor of that name, shape and dtype is there; its bits are not looked at."""
        for key in self._keys(name):
            try:
                with safe_open(self.files[key], "pt") as file:
                    part = file.get_slice(key)
                    if part.get_dtype() == _NAMES.get(tensor.dtype) and part.get_shape() == list(
                        tensor.shape
                    ):
                        return True
            except _UNREADABLE:
                continue
        return False

    def find(self, name: str, tensor: Tensor) -> TensorRef | None:
        """A reference to `tensor` if a file holds the same bits under its name."""
        for key in self._keys(name):
            file = self.files[key]
            try:
                signature = _signature(file)
                with safe_open(file, "pt") as opened:
                    stored = opened.get_tensor(key)
            except _UNREADABLE:
                continue
            if (
                stored.dtype == tensor.dtype
                and stored.shape == tensor.shape
                and torch.equal(raw(stored), raw(tensor))
            ):
                return TensorRef(file, key, digest(stored), signature)
        return None


_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


class Journal:
    """Everything needed to take a patch back, newest last."""

    def __init__(self, model: nn.Module, keep_original: bool = True) -> None:
        self.keep_original = keep_original
        self.checkpoint = Checkpoint(model)
        self.swaps: list[tuple[nn.Module, nn.Module]] = []  # old, new
        self._first: dict[nn.Module, nn.Module] = {}  # new -> what was there before any swap
        # Parameter -> its bits, and the module that replaced its own.
        self.saved: dict[nn.Parameter, tuple[TensorRef | Held, nn.Module]] = {}
        self.undos: list[Callable[[nn.Module], None]] = []
        self._spill: Path | None = None
        self._written = 0

    # Recording ----------------------------------------------------------------------------------------------

    def check_space(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse, before anything changes, what the spill folder has no room for."""
        if not self.keep_original:
            return
        need = sum(
            t.numel() * t.element_size() for name, t in tensors if not self.checkpoint.may_have(name, t)
        )
        root = spill_root()
        there = next((place for place in (root, *root.parents) if place.is_dir()), Path("/"))
        if need > (free := shutil.disk_usage(there).free):
            raise PatchError(_no_room(need, free))

    def save(self, name: str, parameter: nn.Parameter, new: nn.Module) -> None:
        """Journal a parameter's bits; its storage may be freed afterwards with `release`."""
        if parameter in self.saved:
            return
        ref = self.checkpoint.find(name, parameter)
        if ref is None:
            ref = self._write(name, parameter) if self.keep_original else Held(parameter.data)
        self.saved[parameter] = ref, new

    def release(self, parameter: nn.Parameter) -> None:
        """Free a journaled parameter's storage, pages of a mapped file too; the object stays."""
        ref, _ = self.saved.get(parameter, (None, None))
        if isinstance(ref, TensorRef):
            drop_pages(parameter.data, ref.file)
        parameter.data = parameter.data.new_empty(0)

    def swap(self, parent: nn.Module, attribute: str, new: nn.Module) -> None:
        old = getattr(parent, attribute)
        # What replaces a replacement stands for the same original.
        first = self._first[new] = self._first.get(old, old)
        at = next((i for i, (known, _) in enumerate(self.swaps) if known is first), None)
        if at is None:
            self.swaps.append((first, new))
        else:
            self.swaps[at] = (first, new)
        setattr(parent, attribute, new)
        compat.fit_wrapper(parent, True)

    def on_undo(self, undo: Callable[[nn.Module], None]) -> None:
        """`undo(model)` is called when the patch is taken back."""
        self.undos.append(undo)

    def keep_files_of(self, folder: Path) -> None:
        """Copy originals that lie in `folder` to the spill folder: its files are about to be replaced."""
        folder = Path(os.path.realpath(folder))
        for parameter, (ref, new) in list(self.saved.items()):
            if isinstance(ref, TensorRef) and folder in Path(os.path.realpath(ref.file)).parents:
                self.saved[parameter] = self._write(ref.key, ref.read()), new

    def done(self) -> None:
        """The patch is through: what was held for its rollback alone goes."""
        if not self.keep_original:
            self.saved.clear()

    def _write(self, name: str, tensor: Tensor) -> TensorRef:
        if self._spill is None:
            root = spill_root()
            try:
                root.mkdir(parents=True, exist_ok=True)
                self._spill = Path(tempfile.mkdtemp(prefix="hfaccel-spill-", dir=root))
            except OSError as error:
                raise PatchError(f"HFACCEL_SPILL_DIR={root}: cannot be written: {error}") from error
            weakref.finalize(self, _remove, str(self._spill), os.getpid())
        file = self._spill / f"{self._written:05d}.safetensors"
        self._written += 1
        plain = tensor.detach().cpu().contiguous()
        need, free = plain.numel() * plain.element_size(), shutil.disk_usage(self._spill).free
        try:
            if need > free:
                raise OSError("no space left")
            save_file({name: plain}, file)
        except (OSError, SafetensorError) as error:
            raise PatchError(f"{name}: {error}. {_no_room(need, free)}") from error
        return TensorRef(str(file), name, digest(plain), _signature(str(file)))

    # Undoing ------------------------------------------------------------------------------------------------

    def restore(self, model: nn.Module) -> None:
        """Put every module and tensor back.

        Raises: PatchError, and nothing has changed, if the bits are not to be had.
        """
        self._require_kept()
        # Clones: the file may be a spill file that goes away, or be rewritten under the map.
        bits = {
            parameter: self._read(parameter).clone() for parameter in self.saved if parameter.numel() == 0
        }
        for parameter, tensor in bits.items():
            parameter.data = tensor
        self._undo(model)

    def rollback(self, model: nn.Module) -> None:
        """Undo every change of a patch that failed."""
        lost = []
        for parameter in self.saved:
            if parameter.numel() == 0:
                try:
                    parameter.data = self._read(parameter).clone()
                except PatchError as error:  # the file was removed in between; the rest is still put back
                    lost.append(str(error))
        self._undo(model)
        if lost:
            raise PatchError(f"{len(lost)} tensors are lost: {lost[0]}")

    def borrow(self, model: nn.Module) -> Callable[[], None]:
        """Show the originals (memory-mapped) in place of the patched modules; the result puts those back."""
        self._require_kept()
        mapped = {p: self._read(p, verify=False) for p in self.saved if p.numel() == 0}
        for parameter, tensor in mapped.items():
            parameter.data = tensor
        _exchange(model, [(new, old) for old, new in self.swaps])

        def give_back() -> None:
            _exchange(model, self.swaps)
            for parameter in mapped:
                self.release(parameter)

        return give_back

    def close(self) -> None:
        """Forget everything and remove the spill files."""
        self.swaps, self._first, self.saved, self.undos = [], {}, {}, []
        if self._spill is not None:
            _remove(str(self._spill), os.getpid())
            self._spill = None

    def _require_kept(self) -> None:
        if not self.keep_original and self.swaps and not self.saved:  # during the patch all is at hand
            raise PatchError(
                "the originals were not kept (keep_original=False): load the model again instead"
            )

    def _read(self, parameter: nn.Parameter, *, verify: bool = True) -> Tensor:
        """A parameter's bits, on the device where the module that replaced its own is now."""
        ref, new = self.saved[parameter]
        device = next((p.device for p in new.parameters(recurse=False)), torch.device("cpu"))
        return ref.read(verify=verify).to(device)

    def _undo(self, model: nn.Module) -> None:
        _exchange(model, [(new, old) for old, new in self.swaps])
        for undo in reversed(self.undos):
            undo(model)
        self.close()


def _exchange(model: nn.Module, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Put the second of each pair wherever the model has the first, wherever adapters have moved it."""
    other = {id(there): (there, back) for there, back in pairs}
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if (pair := other.get(id(child))) is None:
                continue
            there, back = pair
            back.train(there.training)
            for name, buffer in back._buffers.items():  # the parameters come along by themselves
                at = next((p.device for p in there.parameters(recurse=False)), None)
                if buffer is not None and at is not None and buffer.device != at:
                    back._buffers[name] = buffer.to(at)
            parent._modules[key] = back
            compat.fit_wrapper(parent, bool(vars(back).get("layout")))


def spill_root() -> Path:
    return Path(os.environ.get("HFACCEL_SPILL_DIR") or tempfile.gettempdir())


def _no_room(need: int, free: int) -> str:
    return (
        f"keeping the originals needs {need:,} bytes under {spill_root()}, {free:,} are free: set "
        "HFACCEL_SPILL_DIR to a larger disk or pass keep_original=False"
    )


def _remove(folder: str, pid: int) -> None:
    """Remove a spill folder, but never in a forked child, whose parent still reads it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
