"""What stands before the endpoints: keys, how long a request is and takes to arrive, its name in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hfaccel.serve.errors import ApiError, Gone
from hfaccel.serve.service import Service, going_down

OPEN = ("/", "/health", "/metrics", "/version")  # without a key, and while the server goes down
ID_CHARACTERS = 64
SWALLOWED_BYTES, SWALLOWING_S = 64 << 20, 2.0  # of a body that is refused: who is sending can read why

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Access:
    """An ASGI application around another one."""

    def __init__(self, app, service: Service, api_keys: Sequence[str]):
        self.app, self.service = app, service
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = _name(headers.get(b"x-request-id", b""))
        scope.setdefault("state", {})["request_id"] = name
        started = False

        async def sending(message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            await send(message)

        try:
            self._let_in(scope["path"], headers)
            await self.app(scope, await self._whole(headers, receive), sending)
        except Gone:
            return
        except ApiError as error:
            if started:
                raise
            self.service.refused(scope["path"], name, error)
            await respond(error, sending)

    def _let_in(self, path: str, headers: dict[bytes, bytes]) -> None:
        if path in OPEN:
            return
        if self._keys:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            # All are compared, so that the time says nothing of which one it was.
            right = sum(hmac.compare_digest(key.strip(), known) for known in self._keys)
            if kind.lower() != b"bearer" or not right:
                raise ApiError(
                    401,
                    "a valid API key is needed: authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        if self.service.draining:
            raise going_down()

    async def _whole(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """The body, whole, before anybody waits for it. Raises: ApiError for one too long or too slow."""
        bounds, body = self.service.bounds, bytearray()
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > bounds.max_body_bytes:
            await _swallow(receive)
            raise _too_long(bounds.max_body_bytes)
        try:
            async with asyncio.timeout(bounds.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > bounds.max_body_bytes:
                        if more:
                            await _swallow(receive)
                        raise _too_long(bounds.max_body_bytes)
        except TimeoutError:
            raise ApiError(
                408,
                f"the request's body did not arrive within {bounds.body_timeout_s:g} s",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None
        first = True

        async def replay() -> dict[str, Any]:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": bytes(body), "more_body": False}
            return await receive()

        return replay


def _too_long(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request's body is longer than {limit} bytes",
        code="body_too_long",
        headers={"connection": "close"},
    )


async def _swallow(receive: Receive) -> None:
    """Read on for a while: a connection that is closed with bytes unread loses the answer, too."""
    taken = 0
    try:
        async with asyncio.timeout(SWALLOWING_S):
            while taken < SWALLOWED_BYTES:
                message = await receive()
                taken += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _name(given: bytes) -> str:
    """A request's name: the client's where it is harmless in a log."""
    text = given.decode("latin-1")
    plain = text.isascii() and all(letter.isalnum() or letter in "-_." for letter in text)
    return text if text and plain and len(text) <= ID_CHARACTERS else secrets.token_hex(12)


async def respond(error: ApiError, send) -> None:
    """Send an error as a whole answer."""
    body = json.dumps(error.body).encode()
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
