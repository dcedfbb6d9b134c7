"""A server process: uvicorn, its log, and its end.

SIGTERM and SIGINT end it in order: nothing new is taken, streams go on, what is left after `drain_s` ends
with an error event, then pages go back and the process exits with 0. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import uvicorn

from hfaccel.errors import PatchError
from hfaccel.serve.access import Access
from hfaccel.serve.service import tell

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AFTER_DRAIN_S = 5.0  # for clients to read the error event


class Process(uvicorn.Server):
    """uvicorn's server, drained at its end."""

    def __init__(self, config: uvicorn.Config, service, drain_s: float):
        super().__init__(config)
        self.service, self.drain_s = service, drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {name: signal.signal(name, self.handle_exit) for name in SIGNALS}
        try:
            yield
        finally:  # unlike uvicorn's own, the signal is not raised once more: a drained end is no failure
            for name, handler in before.items():
                signal.signal(name, handler)

    def handle_exit(self, sig: int, frame) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self.service.drain()

    async def shutdown(self, sockets=None) -> None:
        tell("draining", seconds=self.drain_s)
        self.service.drain()
        expiry = asyncio.get_running_loop().call_later(self.drain_s, self.service.expire)
        try:
            await super().shutdown(sockets)
        finally:
            expiry.cancel()


class _Line(logging.Formatter):
    """One JSON object a line, with the time; what is no object becomes its message."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            fields = {"event": "log", "logger": record.name, "message": text}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), **fields}
        return json.dumps(said)


def log_lines(level: int = logging.INFO) -> None:
    """Have the log of the server, of hfaccel and of uvicorn as lines of JSON on stderr."""
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(_Line())
    for name, least in {"hfaccel": level, "uvicorn.error": logging.WARNING}.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [out], False
        logger.setLevel(max(level, least))
    logging.getLogger("hfaccel.serve").setLevel(level)
    logging.captureWarnings(True)


def listen(host: str, port: int) -> socket.socket:
    """The socket, before a model is loaded for nothing. Raises: PatchError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as why:
        made.close()
        raise PatchError(f"cannot listen on {host}:{port}: {why.strerror or why}") from why
    return made


def serve(app: Access, sock: socket.socket, *, drain_s: float = 30.0) -> None:
    """Serve until a signal ends it; the engine stays as it is."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(drain_s + AFTER_DRAIN_S) + 1,
        ws="none",
    )
    Process(config, app.service, drain_s).run(sockets=[sock])
