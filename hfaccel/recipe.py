"""Recipes: the text, list and dict forms of what to do to a model.

    recipe = step ("+" step)*          step = name[bits] ("-" option)*
    recipe = path of a file that ends with .json and holds the dict form

`PatchConfig` is the ordered, validated list of transforms behind all three. `runtime` is the empty list:
nothing is changed but the way `generate` runs. `auto` is no list but a question, which `patch` answers; so is
a budget, `auto@4.5bpw` (`quant/search.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hfaccel.errors import PatchError, UnknownName
from hfaccel.registry import TRANSFORMS, all_transforms, transform_class
from hfaccel.transform import Transform

EMPTY = "runtime"
AUTO = "auto"
BUDGET = f"{AUTO}@"
_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True)
class PatchConfig:
    """An ordered, validated list of transforms."""

    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        whole: set[str] = set()  # methods given for all of the model
        for transform in self.transforms:
            if not isinstance(transform, Transform):
                raise PatchError(
                    f"{transform!r} is not a transform; known are {', '.join(sorted(TRANSFORMS))}"
                )
            if transform.targets is not None:
                continue
            if transform.name in whole:
                raise PatchError(f"{self.describe()}: {transform.name} is given twice for the same targets")
            whole.add(transform.name)

    @classmethod
    def of(cls, config: PatchConfig | str | Transform | dict | Iterable[Transform]) -> PatchConfig:
        """Any form `patch` accepts: recipe string, one transform, a list of them, a dict, a PatchConfig."""
        if isinstance(config, PatchConfig):
            return config
        if isinstance(config, str):
            return cls.from_recipe(config)
        if isinstance(config, Transform):
            return cls((config,))
        if isinstance(config, dict):
            return cls.from_dict(config)
        try:
            return cls(tuple(config))
        except TypeError:
            raise PatchError(
                f"config={config!r}: a recipe string, a transform, a list of transforms, a dict or None"
            ) from None

    @classmethod
    def from_recipe(cls, recipe: str) -> PatchConfig:
        """Parse a recipe, or read the file that it names. Raises: UnknownName for an unknown step or option,
        listing the known ones; PatchError for a file that holds no config."""
        if recipe.endswith(".json"):
            return cls._from_file(Path(recipe))
        steps = [step.strip() for step in recipe.split("+")]
        if steps == [EMPTY]:
            return cls()
        if is_question(recipe):
            check_question(recipe)
            raise PatchError(f"recipe {recipe!r}: only a model can be asked for it")
        if AUTO in steps:
            raise PatchError(f"recipe {recipe!r}: {AUTO!r} stands alone; only a model can be asked for it")
        if EMPTY in steps:
            raise PatchError(f"recipe {recipe!r}: {EMPTY!r} means no other step and stands alone")
        return cls(tuple(map(_parse_step, steps)))

    @classmethod
    def _from_file(cls, path: Path) -> PatchConfig:
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise PatchError(f"recipe {str(path)!r}: {error}") from None
        if not isinstance(data, dict):
            raise PatchError(f"recipe {str(path)!r}: a config dict is {{'transforms': [...]}}")
        return cls.from_dict(data)

    def to_recipe(self) -> str:
        """The recipe string; parsing it gives an equal config.

        Raises: PatchError if targets or ignore are set.
        """
        for transform in self.transforms:
            if transform.targets is not None or transform.ignore is not None:
                raise PatchError(
                    f"{transform.name}: a recipe cannot say targets or ignore; store the dict form instead"
                )
        return "+".join(transform.step() for transform in self.transforms) or EMPTY

    def describe(self) -> str:
        """The recipe where one exists, else its steps with their targets, for people to read."""
        out = []
        for transform in self.transforms:
            extra = [
                f"{key}={list(value)}"
                for key in ("targets", "ignore")
                if (value := getattr(transform, key)) is not None
            ]
            out.append(transform.step() + (f"({', '.join(extra)})" if extra else ""))
        return "+".join(out) or EMPTY

    def to_dict(self) -> dict[str, Any]:
        return {"transforms": [transform.to_dict() for transform in self.transforms]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PatchConfig:
        entries = data.get("transforms")
        if set(data) != {"transforms"} or not isinstance(entries, list | tuple):
            raise PatchError(f"a config dict is {{'transforms': [...]}}, not one with keys {sorted(data)}")
        out = []
        for entry in entries:
            if not isinstance(entry, dict) or "name" not in entry:
                raise PatchError(f"a transform's dict needs a 'name': {entry!r}")
            out.append(transform_class(entry["name"]).from_dict(entry))
        return cls(tuple(out))


@dataclass(frozen=True)
class Budget:
    """`auto@4.5bpw` or `auto@300MB`: bits for every matrix so that all of them keep to it.

    Attributes:
        text: the step as it was given.
        bits_per_weight: over the layers' matrices and the head, as they are stored; or None.
        bytes: of all of the model's tensors; or None.
        measure: by measured sensitivity; False (`-prior`): by the roles of the matrices.
        others: what is done beside, such as `kv8`; nothing that rounds weights.
    """

    text: str
    bits_per_weight: float | None = None
    bytes: int | None = None
    measure: bool = True
    others: tuple[Transform, ...] = ()

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, recipe: str) -> Budget:
        """Raises: PatchError for what is no positive budget, and for other steps that round weights."""
        first, *rest = (step.strip() for step in recipe.split("+"))
        amount, *options = first.removeprefix(BUDGET).split("-")
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", amount.lower())
        unit = found[2] if found else ""
        if not first.startswith(BUDGET) or (unit != "bpw" and unit not in _UNITS):
            raise PatchError(
                f"recipe {recipe!r}: {amount!r} is no budget; known are auto@4.5bpw (bits a weight) and "
                f"auto@300MB ({', '.join(name.upper().replace('I', 'i') for name in _UNITS)})"
            )
        if float(found[1]) <= 0:
            raise PatchError(f"recipe {recipe!r}: a budget is more than nothing")
        if options not in ([], ["prior"]):
            raise UnknownName(f"{first}: unknown option -{options[0]}; known is -prior (nothing is measured)")
        others = tuple(map(_parse_step, rest))
        if rounding := next((t for t in others if t.rounds), None):
            raise PatchError(
                f"recipe {recipe!r}: {first} chooses the bits of every matrix and of the head; "
                f"{rounding.step()!r} beside it would round them again"
            )
        bits, size = (float(found[1]), None) if unit == "bpw" else (None, int(float(found[1]) * _UNITS[unit]))
        return cls(recipe, bits, size, not options, others)


def is_question(config: Any) -> bool:
    """Whether a config is one that `patch` answers by looking at the model: None, `auto`, a budget."""
    return config is None or config == AUTO or (isinstance(config, str) and config.startswith(BUDGET))


def check_question(config: Any) -> None:
    """Refuse a budget that is none before anything is loaded or measured."""
    if isinstance(config, str) and config.startswith(BUDGET):
        Budget.parse(config)


def _parse_step(step: str) -> Transform:
    if not step:
        raise UnknownName(f"an empty step in the recipe; known are {', '.join(known_steps())}")
    if step != step.lower() and "=" not in step:
        raise UnknownName(f"recipe step {step!r}: steps are written in lower case")
    head, *options = step.split("-")
    for name in sorted(TRANSFORMS, key=len, reverse=True):
        if head.startswith(name):
            try:
                return transform_class(name).parse(head[len(name) :], options)
            except UnknownName:
                if head in (known.partition("-")[0] for known in known_steps()):
                    raise  # of an option
                break
    near = get_close_matches(head, known_steps(), 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UnknownName(f"unknown recipe step {step!r}{hint}; known are {', '.join(known_steps())}") from None


def known_steps() -> list[str]:
    return [step for step, _ in recipe_table()]


def recipe_table() -> list[tuple[str, str]]:
    """(step, one line on it) of every method, in the registry's order, and of what stands alone."""
    rows = [row for cls in all_transforms().values() for row in cls.steps]
    return [
        *rows,
        (EMPTY, "no change of weights: generate over the paged cache and the fastest executor"),
        (AUTO, "what patch(model) means: int8 or runtime, by a short measurement of speed and quality"),
        ("auto@4.5bpw", "bits for every matrix under a budget, by measured sensitivity; auto@300MB; -prior"),
    ]
