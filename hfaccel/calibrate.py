"""Samples through a model block by block, observers fed: the only copy of that loop.

    for block, stats in BlockLoop(...):     # None at the end, for what lies outside of the blocks
        change the block's modules

A block is observed as it is, then the caller changes it, then the samples go through what it became: later
blocks see the errors of earlier ones, as they will in use. The model's own `forward` is run for this, one
sample after the other, with three of its blocks alive at most: blocks that are through hand on their input
untouched, the last of them gives the activations kept of that sample, the changed ones run, the next one is
observed, and at its last matrix the forward is left. So masks, positions, biases and whatever else a family
hands its blocks are its own code's, and memory holds one block's inputs and one sample's activations.

A pass over all samples is what costs; observing them too costs as much again and adds little. So statistics
of one block come from at most `capture_tokens` tokens, of samples that take turns from block to block: every
sample counts, in all blocks if there are few.

An interrupt at any point leaves the blocks' forwards as they were; undoing changes is the caller's.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfaccel import compat
from hfaccel.anatomy import Anatomy, Block
from hfaccel.errors import PatchError
from hfaccel.journal import spill_root
from hfaccel.observers import Left, Observed, SiteStats, Want
from hfaccel.transform import Site

log = logging.getLogger("hfaccel")


class BlockLoop:
    """The loop over blocks.

    Args:
        model: unpatched, or patched as far as earlier stages went.
        samples: int64 [T] each.
        sites: every site that the caller is going to change, with what must be observed there (or None).
        capture_tokens: see above; None for no limit.
        spill: activations in a file; None to decide by the free memory.
        advance: called once a sample and pass; `passes` says how many passes there are.
    Raises, while it runs: PatchError for NaN or infinite activations, naming the matrix and the count, and
        for matrices that no token reached.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        samples: list[Tensor],
        sites: Iterable[tuple[Site, Want | None]],
        *,
        capture_tokens: int | None = None,
        spill: bool | None = None,
        advance: Callable[..., None] = lambda steps=1: None,
    ) -> None:
        self.model, self.samples, self.advance = model, samples, advance
        # Encoders first: the order in which blocks run.
        order = sorted(range(len(anatomy.blocks)), key=lambda i: anatomy.blocks[i].stack == "decoder")
        self.blocks = [(i, anatomy.blocks[i]) for i in order]
        self.sites: dict[int | None, list[tuple[Site, Want]]] = {}
        self.touched: set[int | None] = set()
        for site, want in sites:
            self.touched.add(site.block)
            if want is not None:
                self.sites.setdefault(site.block, []).append((site, want))
        self.first_readers = {
            reader: group.readers[0] for group in anatomy.groups for reader in group.readers[1:]
        }
        self.capture_tokens = capture_tokens
        self.device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self.store = _Activations(spill, sum(sample.numel() for sample in samples))
        self.thin: list[str] = []  # matrices with fewer tokens than inputs

    @property
    def passes(self) -> int:
        return len(self.touched - {None}) + (None in self.sites)

    def __iter__(self) -> Iterator[tuple[int | None, SiteStats]]:
        """Yields the position of a block in `Anatomy.blocks` and its sites' statistics; (None, ...) last."""
        done = 0  # blocks through which the activations kept have gone
        with torch.no_grad(), _evaluating(self.model), self.store:
            for place, (index, _) in enumerate(self.blocks):
                if index not in self.touched:
                    continue
                yield index, self._pass(done, place, self.sites.get(index, []))
                done = place
            outside = self.sites.get(None, [])
            stats = self._pass(done, len(self.blocks), outside) if outside else {}
        if self.thin:
            log.warning(
                "calibration: %d matrices saw fewer tokens than they have inputs, more data would do better: "
                "%s%s",
                len(self.thin),
                "; ".join(self.thin[:3]),
                "; ..." if len(self.thin) > 3 else "",
            )
        yield None, stats

    def _pass(self, done: int, place: int, sites: list[tuple[Site, Want]]) -> SiteStats:
        """Take every sample from block `done` to block `place`, and observe `sites` there."""
        chosen = self._chosen(place)
        tokens = sum(self.samples[s].numel() for s in chosen)
        observed = Observed(sites, self.first_readers, self.device, tokens)
        steps = _Steps([block for _, block in self.blocks], done, place, self.store, observed)
        with steps, observed:
            for s, sample in enumerate(self.samples):
                steps.sample, observed.on = s, bool(sites) and s in chosen
                if observed.on or done < place < len(self.blocks):
                    try:
                        self._forward(sample)
                    except Left:
                        pass
                    observed.end_of_sample()
                self.advance()
        compat.retie_offloaded(self.model)  # each forward leaves new placeholders
        return observed.finish(self.thin)

    def _chosen(self, place: int) -> set[int]:
        """The samples whose turn it is at block `place`."""
        if self.capture_tokens is None:
            return set(range(len(self.samples)))
        # Spread over the samples, which are sorted by length; each block starts where the last one stopped.
        count, mean = len(self.samples), sum(s.numel() for s in self.samples) / len(self.samples)
        share = max(1, -(-count // max(1, int(self.capture_tokens / mean))))
        return {s for s in range(count) if s % share == place % share}

    def _forward(self, sample: Tensor) -> None:
        ids = sample[None].to(self.device)
        extra = {"decoder_input_ids": ids} if self.model.config.is_encoder_decoder else {}
        self.model(input_ids=ids, use_cache=False, **extra)


class _Steps:
    """The blocks' forwards during one pass: through, alive, observed."""

    def __init__(
        self, blocks: list[Block], done: int, place: int, store: _Activations, observed: Observed
    ) -> None:
        self.blocks, self.done, self.place, self.store, self.observed = blocks, done, place, store, observed
        self.sample = 0
        self.restore: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> _Steps:
        for at, block in enumerate(self.blocks):
            if at < self.done:
                step = partial(self._through, at, block.stack)
            elif at < self.place:
                step = partial(self._alive, at, block.stack, block.module.forward)
            elif at == self.place:
                step = partial(self._observe, block.module.forward)
            else:
                break
            self.restore.append((block.module, vars(block.module).get("forward")))
            block.module.forward = step
        return self

    def __exit__(self, *error: Any) -> None:
        for module, own in reversed(self.restore):
            if own is None:
                vars(module).pop("forward", None)
            else:
                module.forward = own
        self.restore.clear()

    def _last(self, at: int) -> bool:
        """Whether a block's output is kept: the last one before what is observed, or of its stack."""
        return at + 1 in (self.place, len(self.blocks)) or self.blocks[at + 1].stack != self.blocks[at].stack

    def _through(self, at: int, stack: str, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if at + 1 == self.done or self.blocks[at + 1].stack != stack:
            hidden = self.store.get(stack, self.sample, hidden.device)
        return self.store.rebuild(at, self.sample, hidden, args, kwargs)

    def _alive(self, at: int, stack: str, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        self.store.describe(at, self.sample, output, args, kwargs)
        if self._last(at):
            self.store.put(stack, self.sample, output[0] if isinstance(output, tuple) else output)
        if at + 1 == self.place and not self.observed.on:
            raise Left
        return output

    @staticmethod
    def _observe(forward: Callable, *args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        raise Left


class _Activations:
    """What the samples became: per stack and sample one tensor, and what else blocks gave.

    A block gives its hidden states, or a tuple that begins with them. The rest of a tuple is None, an
    argument handed on, or something made there (T5's position bias), which is kept; equal ones once.
    """

    def __init__(self, spill: bool | None, tokens: int) -> None:
        self.spill, self.tokens, self.folder = spill, tokens, None
        self.hidden: dict[tuple[str, int], Tensor] = {}
        self.shapes: dict[int, list | None] = {}  # block -> what its tuple holds, None if it gives no tuple
        self.made: dict[tuple[int, int, int], Tensor] = {}  # block, sample, position in the tuple

    def __enter__(self) -> _Activations:
        return self

    def __exit__(self, *error: Any) -> None:
        self.hidden.clear()
        self.made.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def get(self, stack: str, sample: int, device: torch.device) -> Tensor:
        return self.hidden[stack, sample].to(device)

    def put(self, stack: str, sample: int, hidden: Tensor) -> None:
        kept = self.hidden.get((stack, sample))
        if kept is not None and kept.shape == hidden.shape and kept.dtype == hidden.dtype:
            kept.copy_(hidden)
            return
        if self.spill is None:
            need = hidden.numel() * hidden.element_size() // hidden.shape[-2] * self.tokens
            self.spill = need > _free_memory() / 2
        self.hidden[stack, sample] = self._file(stack, sample, hidden) if self.spill else hidden.clone()

    def _file(self, stack: str, sample: int, hidden: Tensor) -> Tensor:
        """The same on disk, memory-mapped: the system writes it back and drops it as it needs to."""
        if self.folder is None:
            root = spill_root()
            root.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="hfaccel-activations-", dir=root))
        need, free = hidden.numel() * hidden.element_size(), shutil.disk_usage(self.folder).free
        if need > free:
            raise PatchError(
                f"spilling activations needs {need:,} more bytes under {spill_root()}, {free:,} are free"
            )
        file = str(self.folder / f"{stack}-{sample:05d}")
        mapped = torch.from_file(file, shared=True, size=hidden.numel(), dtype=hidden.dtype)
        return mapped.view(hidden.shape).copy_(hidden)

    def describe(self, at: int, sample: int, output: Any, args: tuple, kwargs: dict) -> None:
        if not isinstance(output, tuple):
            self.shapes[at] = None
            return
        rest: list[Any] = []
        given = {**dict(enumerate(args)), **kwargs}
        for position, item in enumerate(output[1:], 1):
            if item is None:
                rest.append(None)
                continue
            # By identity; the hidden states handed in are no argument to hand on.
            key = next((key for key, value in given.items() if value is item and key != 0), None)
            rest.append(("given", key) if key is not None else ("made", position))
            if key is None:
                before = self.made.get((at, sample - 1, position))
                same = before is not None and isinstance(item, Tensor) and before.shape == item.shape
                same = same and torch.equal(before, item)
                self.made[at, sample, position] = before if same else item
        self.shapes[at] = rest

    def rebuild(self, at: int, sample: int, hidden: Tensor, args: tuple, kwargs: dict) -> Any:
        rest = self.shapes[at]
        if rest is None:
            return hidden
        out: list[Any] = [hidden]
        for item in rest:
            if item is None:
                out.append(None)
            elif item[0] == "given":
                out.append(args[item[1]] if isinstance(item[1], int) else kwargs[item[1]])
            else:
                out.append(self.made[at, sample, item[1]])
        return tuple(out)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout meanwhile; afterwards what has the name of a module in training mode is in it again."""
    training = [name for name, module in model.named_modules() if module.training]
    for name in training:
        model.get_submodule(name).training = False
    try:
        yield
    finally:
        for name in training:
            model.get_submodule(name).training = True


def _free_memory() -> float:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float("inf")
