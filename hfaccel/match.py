"""The one language in which `targets` and `ignore` name parts of a model.

A pattern is matched against full dotted names (`model.layers.0.self_attn.q_proj`):
    `*`    any run of characters within one part: `model.layers.*.mlp.*_proj`
    `**`   any number of parts, none included: `**.q_proj`, `model.layers.1.**`
    `re:`  the rest is a regular expression that must match the whole name: `re:.*layers\\.[0-3]\\..*`
Everything else is literal, so a plain name means one place. Where an adapter wraps a layer
(`q_proj.base_layer`), the name without `.base_layer` means it too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from hfaccel.compat import plain_name
from hfaccel.errors import NoMatch, PatchError

_TOKENS = re.compile(r"\*\*\.|\.\*\*$|\*+|[^*.]+|\.")
_SPECIAL = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": r"[^.]*"}
_SHOWN = 5  # names in a message


def select(
    names: Sequence[str],
    targets: str | Iterable[str] | None = None,
    ignore: str | Iterable[str] | None = None,
    builtin_ignore: Iterable[str] = (),
) -> list[str]:
    """The `names` that `targets` matches (None: all) and neither ignore list does, in their order.

    `ignore` adds to `builtin_ignore`; an explicit `ignore=()` with explicit targets switches the latter off.

    Raises: NoMatch for a target or ignore pattern that no name matches, for a target of which the built-in
        list takes every match, and for empty targets; PatchError for a malformed pattern.
    """
    targets, ignore = _listed(targets, "targets"), _listed(ignore, "ignore")
    spared = set(names)
    if not (ignore == () and targets is not None):
        spared -= _matching(names, builtin_ignore)
    for pattern in ignore or ():
        spared -= _known(pattern, names, "ignore")
    if targets is None:
        return [name for name in names if name in spared]
    if not targets:
        raise NoMatch("targets=() selects nothing; leave targets out for the default")
    chosen: set[str] = set()
    builtin = _matching(names, builtin_ignore) if ignore != () else set()
    for pattern in targets:
        matched = _known(pattern, names, "target")
        if matched <= builtin:
            raise NoMatch(
                f"target {pattern!r} matches only what is left alone by default ({_some(matched)}); "
                "ignore=() switches the default off"
            )
        chosen |= matched
    return [name for name in names if name in chosen & spared]


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches the full name. Raises: PatchError if it is malformed."""
    return any(_compiled(pattern).fullmatch(form) for form in (name, plain_name(name)))


def _listed(patterns: str | Iterable[str] | None, what: str) -> tuple[str, ...] | None:
    if patterns is None:
        return None
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise PatchError(f"{what}: {pattern!r} is no pattern such as 'model.layers.*.mlp.**'")
    return patterns


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        if pattern.startswith("re:"):
            return re.compile(pattern[3:])
        if "***" in pattern:
            raise PatchError(
                f"pattern {pattern!r}: '*' is within one part, '**' across parts; '***' is neither"
            )
        tokens = _TOKENS.findall(pattern)
        return re.compile("".join(_SPECIAL.get(token) or re.escape(token) for token in tokens))
    except re.error as error:
        raise PatchError(f"pattern {pattern!r} is not a regular expression: {error}") from None


def _matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    exact, rest = set(), []
    for pattern in patterns:
        (rest.append if "*" in pattern or pattern.startswith("re:") else exact.add)(pattern)
    return {name for name in names if name in exact or any(matches(pattern, name) for pattern in rest)}


def _known(pattern: str, names: Sequence[str], what: str) -> set[str]:
    compiled = _compiled(pattern)
    found = {name for name in names if compiled.fullmatch(name) or compiled.fullmatch(plain_name(name))}
    if not found:
        raise NoMatch(f"{what} {pattern!r} matches nothing{_hint(pattern, names)}")
    return found


def _hint(pattern: str, names: Sequence[str]) -> str:
    """The names a mistaken pattern probably meant: those that end with it, else the most similar ones."""
    if not names:
        return ": there is nothing to choose from"
    if not pattern.startswith("re:"):
        ending = [name for name in names if matches(f"**.{pattern}", name)]
        if ending:
            return f"; names are full ones: '**.{pattern}' would match {_some(ending)}"
    close = difflib.get_close_matches(pattern.removeprefix("re:"), names, n=_SHOWN, cutoff=0.0)
    return f"; the closest names are {_some(close)}"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN] if isinstance(names, set) else names[:_SHOWN]) + rest
