"""The class of a patched model: the model's own with a mixin in front, under the same name.

Extending the class leaves every other model alone, and methods found on the type work where attributes of the
instance would not.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Mixin:
    """Base of what goes in front. `_hfaccel_class` is the class it stands before."""

    _hfaccel_class: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `type(model)(config)` and `type(model).from_pretrained(...)` are of the class that was patched.
        return cls._hfaccel_class(*args, **kwargs) if args or kwargs else super().__new__(cls)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        cls = type(self)
        return _rebuild, (cls._hfaccel_class, cls.__bases__[0]), vars(self)


_MADE: dict[tuple[type, type], type] = {}


def _extended(cls: type, mixin: type[Mixin]) -> type:
    if (cls, mixin) not in _MADE:
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_hfaccel_class": cls}
        _MADE[cls, mixin] = type(cls.__name__, (mixin, cls), body)
    return _MADE[cls, mixin]


def _rebuild(cls: type, mixin: type[Mixin]) -> Any:
    extended = _extended(cls, mixin)
    return extended.__new__(extended)


def extend(model: nn.Module, mixin: type[Mixin]) -> None:
    """Put `mixin`, and no other, in front of the model's own class."""
    model.__class__ = _extended(getattr(type(model), "_hfaccel_class", type(model)), mixin)


def restore(model: nn.Module) -> None:
    """Give the model its own class back."""
    model.__class__ = getattr(type(model), "_hfaccel_class", type(model))
