"""Which modules a config changes: every site of every transform, found and checked beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from hfaccel import compat
from hfaccel.anatomy import Anatomy, anatomy, builtin_ignore
from hfaccel.errors import PatchError
from hfaccel.match import matches, select
from hfaccel.quant.head import Head
from hfaccel.quant.linear import is_fused_experts
from hfaccel.quant.packing import unpackable
from hfaccel.recipe import PatchConfig
from hfaccel.transform import Site, Transform, Unit


def check_materialized(model: nn.Module) -> None:
    """Refuse parameters without data, except those an offload hook holds elsewhere."""
    compat.check_offload(model)
    for name, module in model.named_modules():
        if compat.is_offloaded(module):
            continue
        for key, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta:
                raise PatchError(
                    f"{name + '.' if name else ''}{key} is on the meta device and has no data; "
                    "load the weights first"
                )


@dataclass
class Plan:
    """Every site of every transform, found and checked before anything changes."""

    anatomy: Anatomy
    work: list[tuple[Transform, list[Site]]]
    skipped: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module, config: PatchConfig) -> Plan:
        """Raises: PatchError for everything that cannot be done."""
        parts = anatomy(model)
        finder = _Finder(model, parts)
        transforms = list(config.transforms)
        if any(t.rounds for t in transforms):
            compat.check_unquantized(model)
        weighted = [t for t in transforms if t.rounds and not isinstance(t, Head)]
        if any(t.targets is None for t in weighted) and not any(isinstance(t, Head) for t in transforms):
            named = {name for t in weighted if t.targets is not None for name in finder.names(t)}
            if parts.head not in named:
                transforms.append(Head())
        transforms.sort(key=lambda t: t.stage)
        work, owner = [], {}
        for transform in transforms:
            transform.check(model)
            sites = finder.sites(transform)
            for site in sites if transform.rounds else ():
                if id(site.module) in owner:
                    raise PatchError(
                        f"{site.name}: rounded by both {owner[id(site.module)].step()!r} and "
                        f"{transform.step()!r}; narrow their targets so that each weight is rounded once"
                    )
                owner[id(site.module)] = transform
            work.append((transform, sites))
        if rounding := [t for t in transforms if t.rounds]:
            changed = {name for _, sites in work for site in sites for name in (site.name, *site.aliases)}
            for name in parts.matrices:
                owner_name = finder.owner_name(name)
                if owner_name not in changed and name not in finder.skipped:
                    finder.skipped[name] = finder.why_not_a_target(name, rounding)
        return cls(parts, work, finder.skipped)

    def replaced(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and tensor of every matrix that is going to be rounded, each once."""
        seen: set[int] = set()
        for transform, sites in self.work:
            for site in sites if transform.rounds else ():
                for key, parameter in site.module._parameters.items():
                    if parameter is None or parameter.dim() < 2 or parameter.is_meta or id(parameter) in seen:
                        continue
                    seen.add(id(parameter))
                    yield f"{site.name}.{key}", parameter


class _Finder:
    """Finds the sites of transforms in one model."""

    def __init__(self, model: nn.Module, parts: Anatomy) -> None:
        self.model, self.parts = model, parts
        self.skipped: dict[str, str] = {}
        self.aliases: dict[int, list[str]] = {}  # by module, names from the model on
        for name, module in model.named_modules(remove_duplicate=False):
            self.aliases.setdefault(id(module), []).append(name)
        self.feeders = {reader: group.feeder for group in parts.groups for reader in group.readers}
        self.positions = {block.name: i for i, block in enumerate(parts.blocks)}

    def names(self, transform: Transform) -> list[str]:
        """Names of a LINEAR transform's sites, in the model's order."""
        default = transform.default_targets(self.parts)
        if transform.targets is None:
            return [name for name in select(list(default), None, transform.ignore) if not self._why_not(name)]
        named = [name for name in self.parts.matrices if not compat.is_adapter_part(name)]
        ignored = (
            builtin_ignore(self.parts) if transform.rounds else [n for n in named if n not in set(default)]
        )
        chosen = select(named, transform.targets, transform.ignore, ignored)
        fit = [name for name in chosen if not self._why_not(name)]
        if chosen and not fit:
            raise PatchError(f"{chosen[0]}: {self.skipped[chosen[0]]}")
        return fit

    def _why_not(self, name: str) -> str:
        """Why a matrix is left alone, noted for the report; "" if it is not."""
        if name not in self.skipped:
            module = self.owner(name)
            with compat.materialized(module):
                why = unpackable(module)
            if not why and self._casts(name) == "always":
                why = f"{type(self.model.get_submodule(self._place(name)[0])).__name__} casts to its dtype"
            if not why:
                return ""
            self.skipped[name] = why
        return self.skipped[name]

    def why_not_a_target(self, name: str, rounding: Iterable[Transform]) -> str:
        """Why no transform takes a matrix that could be rounded."""
        for transform in rounding:
            if transform.targets is None:
                wanted = name in transform.default_targets(self.parts)
            else:
                wanted = any(matches(pattern, name) for pattern in transform.targets)
            if not wanted:
                continue
            pattern = next((p for p in transform.ignore or () if matches(p, name)), None)
            return "left alone by default" if pattern is None else f"ignored by {pattern!r}"
        return "not a target"

    def _place(self, name: str) -> tuple[str, str]:
        """Parent and attribute under which the model, not an adapter, calls a module."""
        parent, _, attribute = name.removesuffix(".base_layer").rpartition(".")
        return parent, attribute

    def _casts(self, name: str) -> str:
        parent, attribute = self._place(name)
        if self.owner_name(name) != name:  # a parameter of fused experts
            return ""
        return compat.casts_to_weight(self.model.get_submodule(parent), attribute)

    def owner_name(self, name: str) -> str:
        """Name of the module that a matrix's name leads to: itself, or the fused experts that hold it."""
        try:
            self.model.get_submodule(name)
            return name
        except AttributeError:
            return name.rpartition(".")[0]

    def owner(self, name: str) -> nn.Module:
        return compat.base_layer(self.model.get_submodule(self.owner_name(name)))

    def sites(self, transform: Transform) -> list[Site]:
        if transform.unit is Unit.MODEL:
            return [Site(self.model, "", aliases=("",))]
        if transform.unit is Unit.BLOCK:
            return [
                Site(b.module, b.name, block=i, aliases=(b.name,)) for i, b in enumerate(self.parts.blocks)
            ]
        names = self.names(transform)
        out: dict[int, Site] = {}
        for name in names:
            module = self.owner(name)
            if id(module) in out:
                continue
            if is_fused_experts(module):
                self._check_whole(module, self.owner_name(name), names)
            block, role = self.parts.locate(name)
            at = None if block is None else self.positions[block.name]
            out[id(module)] = self._site(module, role, at, self.feeders.get(name))
            if isinstance(module, nn.Embedding) and transform.rounds:
                for twin in self._twins(module):  # T5's three tables, which are one
                    out.setdefault(id(twin), self._site(twin, role, None, None))
        if transform.rounds:
            self._check_wrappers(out.values())
        return list(out.values())

    def _site(self, module: nn.Module, role: str, block: int | None, feeder: str | None) -> Site:
        aliases = tuple(self.aliases[id(module)])
        as_int8 = any(self._casts(alias) == "int8" for alias in aliases)
        return Site(module, aliases[0], role, block, feeder, aliases, as_int8)

    def _twins(self, embedding: nn.Embedding) -> list[nn.Module]:
        return [
            module
            for module in self.model.modules()
            if isinstance(module, nn.Embedding)
            and module is not embedding
            and module.weight is embedding.weight
        ]

    def _check_whole(self, experts: nn.Module, name: str, names: list[str]) -> None:
        known = {n for n in self.parts.matrices if n.rpartition(".")[0] == name}
        if left := sorted(known - set(names)):
            raise PatchError(f"{name}: fused experts are rounded as one; {left[0]} is not among the targets")

    def _check_wrappers(self, sites: Iterable[Site]) -> None:
        for site in sites:
            for alias in site.aliases:
                while alias.endswith(".base_layer"):
                    alias = alias.removesuffix(".base_layer")
                    compat.check_wrapper(alias, self.model.get_submodule(alias))
