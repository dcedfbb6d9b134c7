"""What a client is told when something is refused or fails: OpenAI's error object, naming the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hfaccel.serve.grammar import BadGrammar
from hfaccel.serve.requests import Refused

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# What fields of a request are called here -> there.
FIELDS = {"max_new_tokens": "max_tokens", "stop_ids": "stop_token_ids", "adapter": "model"}
# Branches of a union that pydantic puts into the place of an error: no part of a field's name.
_BRANCH = re.compile(r"^(str|int|float|bool|dict|none|function-.*|.*\[.*|[A-Z]\w*)$")


class ApiError(Exception):
    """A refusal or failure with its status.

    Args:
        param: the field that is wrong. code: for programs, e.g. "model_not_found".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Gone(ApiError):
    """The client hung up: there is nobody to be told."""

    def __init__(self):
        super().__init__(499, "the client closed the connection")


def of_refusal(error: Refused, **fields: str) -> ApiError:
    """400 for a request that can never be served. fields: names of options here -> there."""
    option = error.option
    return ApiError(400, str(error), param=fields.get(option) or FIELDS.get(option, option))


def of_failure(error: BaseException) -> ApiError:
    """What ended a request that ran: 500, without what only the log should say."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadGrammar):  # its limits are seen on the way alone
        return ApiError(400, str(error))
    if isinstance(error, Refused):  # what was taken is cancelled where the engine closes
        return ApiError(503, "the engine is closed", code="engine_closed")
    return ApiError(500, f"the request failed in the engine: {type(error).__name__}", code="engine_error")


def of_validation(errors: list[Mapping[str, Any]]) -> ApiError:
    """400 for a body that is not what its endpoint takes; the first error that reached deepest counts."""
    if not errors:
        return ApiError(400, "the request is not valid")
    deepest = max(errors, key=lambda error: len(error["loc"]))
    shallow = [error for error in errors if error["type"] in ("extra_forbidden", "missing", "json_invalid")]
    error = shallow[0] if shallow and len(shallow[0]["loc"]) <= 2 else deepest
    kind, place = error["type"], [part for part in error["loc"] if part != "body"]
    if kind == "json_invalid":
        why = (error.get("ctx") or {}).get("error", error["msg"])
        return ApiError(400, f"the body is no JSON: {why} at character {place[-1] if place else 0}")
    kept = [str(part) for part in place if isinstance(part, int) or not _BRANCH.match(str(part))]
    param = ".".join(kept) or None
    if kind == "missing" and param is None:
        return ApiError(400, "the request needs a body")
    if param is None and kind == "value_error":  # of several fields; the first is named first
        said = error["msg"].removeprefix("Value error, ")
        return ApiError(400, said, param=re.split(r"[ :]", said)[0])
    if param is None:
        return ApiError(400, "the body is a JSON object, with content-type: application/json")
    if kind == "extra_forbidden":
        return ApiError(400, f"{param} is no field that this server knows", param=param, code="unknown_field")
    said = error["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {said[:1].lower()}{said[1:]}", param=param)
