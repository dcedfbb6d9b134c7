"""Tool calls in the text of an answer: where they begin and end, by the way the model was taught to write.

Required and named calls are written as a JSON list that a grammar enforces, `[{"name": ..., "arguments":
{...}}]`, whatever the model was taught. Calls of the model's own accord are looked for in its dialect:

    hermes   <tool_call>{"name": ..., "arguments": ...}</tool_call>
    mistral  [TOOL_CALLS][{"name": ..., "arguments": ...}]
    llama    {"name": ..., "parameters": ...}, which is all of the answer

A call is given out whole, in one piece of a stream. The finish reason is "tool_calls" where there is one
and the answer was not cut, for named calls too; a cut answer says "length", and has the calls that are whole.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hfaccel.serve.protocol import NamedTool, Tool, is_unicode

MOST_CALLS = 16  # in parallel, of a required list
# Keywords of a schema whose values are schemas by name, and those whose values are no schemas.
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")
HERMES = ("<tool_call>", "</tool_call>")
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"


def dialect_of(template: str | None) -> str:
    """How a chat template has calls written."""
    template = template or ""
    if HERMES[0] in template:
        return "hermes"
    if MISTRAL in template:
        return "mistral"
    return "llama" if LLAMA in template or "parameters" in template else "hermes"


def calls_schema(tools: Sequence[Tool], choice: NamedTool | str, parallel: bool) -> dict[str, Any]:
    """JSON schema of the list of calls that `choice` demands."""
    functions = [
        tool.function
        for tool in tools
        if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
    ]
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        none = {"type": "object", "properties": {}, "additionalProperties": False}
        definitions[str(number)] = _moved(function.parameters or none, f"#/$defs/{number}")
        arguments = {"$ref": f"#/$defs/{number}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = MOST_CALLS if parallel and not isinstance(choice, NamedTool) else 1
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "minItems": 1, "maxItems": most, "items": items, "$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose own references, which count from its root, count from where that is now."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, part in schema.items():
        if key == "$ref" and isinstance(part, str) and (part == "#" or part.startswith("#/")):
            found[key] = root + part[1:]
        elif key in _BY_NAME and isinstance(part, dict):
            found[key] = {name: _moved(one, root) for name, one in part.items()}
        else:
            found[key] = part if key in _VALUES else _moved(part, root)
    return found


class Calls:
    """Takes the text of one answer apart.

    Args:
        names: of the tools. forced: the text is a list of calls and nothing else.
        parallel: more than one call counts.
    """

    def __init__(self, names: Sequence[str], dialect: str, *, forced: bool = False, parallel: bool = True):
        self.names, self.dialect, self.forced, self.parallel = set(names), dialect, forced, parallel
        self.calls: list[dict[str, Any]] = []
        self._text = ""  # not given out yet
        self._within = forced  # past the mark that begins a list of calls
        self._said = False

    def whole(self, text: str, *, cut: bool) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls of an answer that is over."""
        deltas = self.put(text) + self.end(cut=cut)
        content = "".join(delta.get("content") or "" for delta in deltas)
        return content, [{k: v for k, v in call.items() if k != "index"} for call in self.calls]

    def reason(self, reason: str) -> str:
        return "tool_calls" if self.calls and reason == "stop" else reason

    def put(self, text: str) -> list[dict[str, Any]]:
        """Deltas that are certain now."""
        self._text += text
        if self.forced or self._within:
            return self._listed()
        if self.dialect == "hermes":
            return self._marked()
        if self.dialect == "mistral":
            at = self._text.find(MISTRAL)
            if at < 0:
                return self._content(len(self._text) - _overlap(self._text, MISTRAL))
            found = self._content(at)
            self._text, self._within = self._text[len(MISTRAL) :], True
            return found + self._listed()
        return self._bare()

    def end(self, *, cut: bool) -> list[dict[str, Any]]:
        """What is left is content, unless it is a piece of a call that was cut off."""
        if self.forced or self._within:
            if self.forced or self.calls or cut:
                self._text = ""
            return self._content(len(self._text))
        if self.dialect == "llama" and self._begins():
            found, at = [], self._text.removeprefix(LLAMA).lstrip()
            while at:
                call, at = self._call(at)
                if call is None:
                    break
                found.append(call)
                at = at.lstrip(" ;\n")
            if found and (not at or cut):
                self._text = ""
                return [delta for call in found for delta in self._give(call)]
            if cut and '"name"' in self._text:
                self._text = ""
                return []
        if self.dialect == "hermes" and self._text.startswith(HERMES[0]):
            call, rest = self._call(self._text[len(HERMES[0]) :].lstrip())
            if call is not None and not rest.strip():  # its end mark is a stop token that was not shown
                self._text = ""
                return self._give(call)
            if cut:
                self._text = ""
                return []
        return self._content(len(self._text))

    # -- pieces

    def _content(self, count: int) -> list[dict[str, Any]]:
        text, self._text = self._text[:count], self._text[count:]
        if self.calls and not text.strip():  # white space between calls
            return []
        return [{"content": text}] if text else []

    def _marked(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            at = self._text.find(HERMES[0])
            if at < 0:
                return found + self._content(len(self._text) - _overlap(self._text, HERMES[0]))
            end = self._text.find(HERMES[1], at)
            found += self._content(at)
            if end < 0:
                return found
            end -= at
            call, rest = self._call(self._text[len(HERMES[0]) : end].strip())
            if call is not None and not rest.strip():
                self._text = self._text[end + len(HERMES[1]) :]
                found += self._give(call)
            else:  # no call: what was written
                found += self._content(end + len(HERMES[1]))

    def _listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            rest = self._text.lstrip(" \n\t[,")
            call, after = self._call(rest) if rest.startswith("{") else (None, rest)
            if call is None:
                return found
            self._text = after
            found += self._give(call)

    def _bare(self) -> list[dict[str, Any]]:
        if self._said or not self._begins():
            self._said = True
            return self._content(len(self._text))
        return []

    def _begins(self) -> bool:
        text = self._text.lstrip()
        return not text or text.startswith(("{", LLAMA)) or LLAMA.startswith(text)

    def _call(self, text: str) -> tuple[dict[str, Any] | None, str]:
        """A call that the text begins with, and what comes after it."""
        try:
            value, end = _DECODER.raw_decode(text)
            name = value.get("name") if isinstance(value, Mapping) else None
            if not isinstance(name, str) or name not in self.names:
                return None, text
            arguments = value.get("arguments", value.get("parameters"))
            if isinstance(arguments, str):
                arguments = _DECODER.decode(arguments)
            if not isinstance(arguments, Mapping | None):
                return None, text
            said = json.dumps(arguments or {}, ensure_ascii=False)
            if not is_unicode(said):  # half of a pair of surrogates, which only an escape can say
                said = json.dumps(arguments)
        except (ValueError, RecursionError):
            return None, text
        return {"name": name, "arguments": said}, text[end:]

    def _give(self, function: dict[str, Any]) -> list[dict[str, Any]]:
        if self.calls and not self.parallel:
            return []
        call = {"index": len(self.calls), "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        self.calls.append(call | {"function": function})
        return [{"tool_calls": [self.calls[-1]]}]


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _overlap(text: str, mark: str) -> int:
    """Length of the end of a text that may become the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
