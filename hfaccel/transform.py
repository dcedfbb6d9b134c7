"""The one abstraction: a transform says what it wants to change, checks that it can, and changes one site.

The driver (`patch.py`, `swap.py`) walks the model, matches targets, feeds observers, swaps modules, records
and undoes; a transform never touches the model outside of the site it is given.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from hfaccel.errors import PatchError, UnknownName

if TYPE_CHECKING:
    from hfaccel.anatomy import Anatomy
    from hfaccel.journal import Journal
    from hfaccel.observers import SiteStats, Stats, Want


class Stage(IntEnum):
    """The order of application; within a stage the user's order holds."""

    STRUCTURE = 0
    SPARSITY = 1
    PRECISION = 2
    ADAPTER = 3
    RUNTIME = 4


class Unit(Enum):
    """What one site is: a matrix (linear, embedding, fused experts), a decoder block, or the model."""

    LINEAR = "linear"
    BLOCK = "block"
    MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Fold:
    """What a transform moved between a matrix's inputs and what feeds them; its new form must hold it.

    Attributes:
        columns: [K], what each input column of the matrix is multiplied by, or None.
        rows: [N], what each output row (bias too) is divided by, or None.
        inputs: [K], what the new module multiplies its inputs by, where nothing before it does; or None.
        stats: of the inputs as they will be, in place of what calibration observed, or None.
        note: for the report.
    """

    columns: Tensor | None = None
    rows: Tensor | None = None
    inputs: Tensor | None = None
    stats: Stats | None = None
    note: str = ""


@dataclass(frozen=True)
class Site:
    """One place of a model where a transform applies.

    Attributes:
        module: the module there now.
        name: its full dotted name; the first one where a module has several.
        role: what it is there ("q", "down", "head", "tok", ...; see anatomy.Block), "" if unknown.
        block: position of the block it belongs to in `Anatomy.blocks`, or None.
        feeder: name of the norm or linear whose output only this site's group of linears reads, or None.
        aliases: every dotted name that refers to the same module, `name` included.
        as_int8: its parent casts inputs to the weight's dtype unless that is int8 (T5).
        fold: what `smooth` moved into or out of it, once that is known.
    """

    module: nn.Module
    name: str
    role: str = ""
    block: int | None = None
    feeder: str | None = None
    aliases: tuple[str, ...] = ()
    as_int8: bool = False
    fold: Fold | None = None


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Configuration and behaviour of one method; validated when made, stored as a dict in config.json.

    Attributes:
        targets: patterns (see `match.py`) of the sites to change; None means the method's own default.
        ignore: patterns to leave alone, added to the built-in ones; `()` with explicit targets means none.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    unit: ClassVar[Unit] = Unit.LINEAR
    rounds: ClassVar[bool] = False  # changes stored codes: at most one such transform a weight
    steps: ClassVar[tuple[tuple[str, str], ...]] = ()  # (recipe step, one line on it) for `hfaccel recipes`

    targets: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for key in ("targets", "ignore"):
            value = getattr(self, key)
            if isinstance(value, str):
                value = (value,)
            listed = value is None or isinstance(value, list | tuple | set | frozenset)
            if not listed or not all(isinstance(pattern, str) for pattern in value or ()):
                raise PatchError(f"{type(self).__name__}: {key}={value!r} must be names or patterns")
            if isinstance(value, set | frozenset):
                value = sorted(value)
            self._set(key, None if value is None else tuple(value))

    def _set(self, key: str, value: Any) -> None:
        """Resolve a default while the object is being made."""
        object.__setattr__(self, key, value)

    # What the driver asks -----------------------------------------------------------------------------------

    def default_targets(self, anatomy: Anatomy) -> tuple[str, ...]:
        """Names of the sites when the user gives no targets."""
        return ()

    def check(self, model: nn.Module) -> None:
        """Raise `PatchError` for whatever can be refused before anything changes."""

    def observer(self, site: Site) -> Want | None:
        """What calibration must collect of the inputs at `site`, or None."""
        return None

    def smooth(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        sites: list[Site],
        stats: SiteStats,
        journal: Journal,
    ) -> dict[str, Fold]:
        """Before its sites of one block are changed: what moves from their inputs into what feeds them.

        Norms are replaced here, through the journal; of matrices, which are about to be replaced, the result
        says what `apply` must hold: site's name -> Fold.
        """
        return {}

    def apply(self, site: Site, stats: tuple[Stats, ...] | None) -> nn.Module | None:
        """The deployed form of `site.module`; None leaves it alone.

        Args:
            stats: what was observed, of each matrix in the order of packing (one, but for fused experts);
                None where nothing was asked for.
        """
        return None

    def refine(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        sites: list[Site],
        samples: list[Tensor],
        journal: Journal,
        progress: bool,
    ) -> None:
        """Once, after calibration has gone through all blocks: what needs the whole changed model.

        Args:
            sites: its own; `module` is what was there before.
            samples: int64 [T] each.
            journal: lends the original weights, and takes down what is replaced.
        """

    def prepare(self, site: Site) -> nn.Module:
        """The trainable form of `site.module`."""
        raise PatchError(f"{self.name} has no trainable form")

    def finish(self, model: nn.Module) -> None:
        """Last, once: config fields, attention choice, class mixin."""

    # Text forms ---------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, rest: str, options: list[str]) -> Transform:
        """The transform of a recipe step: `rest` follows the method's name, `options` are the `-` parts."""
        raise NotImplementedError

    def step(self) -> str:
        """The recipe step that `parse` turns into this transform."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Name and the fields that differ from their defaults; JSON types only."""
        out: dict[str, Any] = {"name": self.name}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                out[field.name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Transform:
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in data.items() if key != "name"}
        if unknown := sorted(set(given) - known):
            raise UnknownName(
                f"{cls.name}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}"
            )
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})


@dataclass
class Record:
    """What happened at one site; `report()` prints it, `checkpoint.py` stores what loading needs of it."""

    name: str
    kind: str
    transform: str
    bytes_before: int
    bytes_after: int
    detail: str = ""
