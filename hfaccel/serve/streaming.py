"""Server-sent events, and how a client that leaves ends what it asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.responses import Response

from hfaccel.serve.answers import Answers
from hfaccel.serve.errors import ApiError, Gone

log = logging.getLogger("hfaccel.serve")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on as they come
]
DONE = b"data: [DONE]\n\n"


def event(message: dict[str, Any]) -> bytes:
    """One message of a stream, in ASCII: some clients end lines at U+2028 and U+0085 too."""
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def watched(receive, answers: Answers) -> AsyncIterator[None]:
    """While the block runs, a client that hangs up ends the answers."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answers.fail(Gone())

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        answers.close()


class EventStream(Response):
    """An answer of the HTTP kind: events until the answers are over, an error event where they fail.

    Args:
        form: `head()`, `chunks(batch)` and `tail()` give messages.
        send_timeout_s: for the client to take one.
    """

    def __init__(self, answers: Answers, form, send_timeout_s: float):
        super().__init__(media_type="text/event-stream")
        self.answers, self.form, self.send_timeout_s = answers, form, send_timeout_s

    async def __call__(self, scope, receive, send) -> None:
        self._send = send
        try:
            async with watched(receive, self.answers):
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._events()
        except TimeoutError:
            self.answers.fail(ApiError(408, "the client does not read", code="slow_client"))
            raise _Abort from None

    async def _events(self) -> None:
        try:
            await self._put(self.form.head())
            async for batch in self.answers.parts():
                await self._put(self.form.chunks(batch))
            await self._put(self.form.tail())
        except Gone:
            return
        except ApiError as error:
            await self._put([error.body])
        except TimeoutError:
            raise
        except Exception as error:  # the response has begun: it cannot become another one
            log.exception("a stream failed")
            await self._put([ApiError(500, f"the stream failed: {type(error).__name__}").body])
        await self._write(DONE, more=False)

    async def _put(self, messages: Iterable[dict[str, Any]]) -> None:
        if data := b"".join(map(event, messages)):
            await self._write(data)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self.send_timeout_s):
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


class _Abort(Exception):
    """The connection is no use any more; raised to have it closed."""
