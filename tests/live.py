"""A server process to talk to: `hfaccel serve` on a tiny model with a byte-level tokenizer."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tiny import tiny
from vocabularies import byte_level

# Roles are checked as real templates do it; tools are said so that templates with tools are covered.
TEMPLATE = (
    "{% if tools %}<s>tools{% for t in tools %} {{ t.function.name }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


CONTEXT_TOKENS = 4096  # seconds, even of so small a model


def folder(path: Path, *, family: str = "TL") -> Path:
    """A folder with the model and its tokenizer."""
    model = tiny(family)
    model.config.max_position_embeddings = CONTEXT_TOKENS
    model.save_pretrained(path)
    byte_level(template=TEMPLATE).save_pretrained(path)
    return path


class Live:
    """The process, its address and what it logged.

    Attributes: lines: of the log, as they come, parsed.
    """

    def __init__(self, model: Path, *args: str):
        command = [sys.executable, "-m", "hfaccel.cli", "serve", str(model), "--port", "0", *args]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HFACCEL_LOG": "info"}
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        self.lines: list[dict] = []
        self.raw: list[str] = []
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._serving.wait(120)
        said = next((line for line in self.lines if line["event"] == "serving"), None)
        assert said is not None, "".join(self.raw)
        self.url, self.said = said["url"], said

    def _read(self) -> None:
        for line in self.process.stderr:
            self.raw.append(line)
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))
            if self.lines and self.lines[-1].get("event") == "serving":
                self._serving.set()
        self._serving.set()

    def of(self, event: str) -> list[dict]:
        return [line for line in self.lines if line["event"] == event]

    def request(self, id: str, within: float = 10) -> dict:
        """What it logged of a request, as soon as that is read here."""
        end = time.monotonic() + within
        while True:
            if found := [line for line in self.of("request") if line["id"] == id]:
                return found[0]
            assert time.monotonic() < end, "".join(self.raw[-5:])
            time.sleep(0.01)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(timeout)
        finally:
            self.process.kill()
        self._reader.join(5)
        return code
