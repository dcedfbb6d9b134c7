"""service.py and access.py: limits, time, and an engine that stands still, in this process."""

import asyncio
import threading
import time

import pytest

from hfaccel.serve.api import create_app
from hfaccel.serve.server import Server
from test_readme import _tokenizer

ASKED = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4}


@pytest.fixture
def server(model):
    with Server(model, _tokenizer(model.config.vocab_size), pages=60, max_running=2) as server:
        yield server


class Halted:
    """An engine whose steps wait."""

    def __init__(self, server, monkeypatch):
        self.go, self.step = threading.Event(), server.engine.step
        monkeypatch.setattr(server.engine, "step", self._step)

    def _step(self):
        self.go.wait(20)
        return self.step()


@pytest.fixture
def halted(server, monkeypatch):
    halted = Halted(server, monkeypatch)
    yield halted
    halted.go.set()


def test_the_queue_is_bounded_by_what_runs_and_waits(server, halted, talk):
    app = create_app(server, model_name="m", max_queue=3)

    async def conversation(http):
        calls = [asyncio.create_task(http.post("/v1/completions", json=ASKED)) for _ in range(7)]
        while sum(call.done() for call in calls) < 2:
            await asyncio.sleep(0.01)
        halted.go.set()
        return await asyncio.gather(*calls)

    found = talk(app, conversation)
    assert sorted(answer.status_code for answer in found) == [200] * 5 + [429] * 2
    for answer in found:
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "queue_full" and answer.headers["retry-after"] == "1"
    assert app.service._held == 0 and not app.service._live


def test_a_request_has_its_time(server, halted, talk):
    app = create_app(server, model_name="m", request_timeout_s=0.1)

    async def conversation(http):
        whole = await http.post("/v1/completions", json=ASKED)
        streamed = await http.post("/v1/completions", json=ASKED | {"stream": True})
        return whole, streamed

    whole, streamed = talk(app, conversation)
    assert whole.status_code == 504 and whole.json()["error"]["code"] == "request_timeout"
    assert streamed.status_code == 200 and '"code":"request_timeout"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    halted.go.set()
    end = time.monotonic() + 5
    while server.engine.busy and time.monotonic() < end:
        time.sleep(0.01)
    assert not server.engine.busy and server.engine.pool.used_pages == server.stats()["cached_pages"]


def test_health_says_that_the_engine_is_stuck_or_dead(server, halted, talk):
    app = create_app(server, model_name="m", stall_s=0.15)

    async def conversation(http):
        assert (await http.get("/health")).json() == {"status": "ok"}
        call = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        await asyncio.sleep(0.05)
        assert (await http.get("/health")).status_code == 200
        await asyncio.sleep(0.3)
        stuck = await http.get("/health")
        assert stuck.status_code == 503 and stuck.json() == {"status": "stuck"}
        refused = await http.post("/v1/completions", json=ASKED)
        assert refused.status_code == 503 and "stuck" in refused.json()["error"]["message"]
        halted.go.set()
        assert (await call).status_code == 200
        assert (await http.get("/health")).json() == {"status": "ok"}
        server.close()
        assert (await http.get("/health")).json() == {"status": "dead"}
        return await http.post("/v1/completions", json=ASKED)

    assert talk(app, conversation).status_code == 503


def test_an_error_in_the_engine_is_500_for_its_request_alone(server, monkeypatch, talk):
    app, run = create_app(server, model_name="m"), server.engine._run

    def broken(step):
        if any(request.prompt == [9, 9] for request in step.chunks):
            raise RuntimeError("a secret of the engine")
        return run(step)

    monkeypatch.setattr(server.engine, "_run", broken)

    async def conversation(http):
        bad = await http.post("/v1/completions", json=ASKED | {"prompt": [9, 9]})
        streamed = await http.post("/v1/completions", json=ASKED | {"prompt": [9, 9], "stream": True})
        return bad, streamed, await http.post("/v1/completions", json=ASKED)

    bad, streamed, good = talk(app, conversation)
    assert bad.status_code == 500 and bad.json()["error"]["type"] == "server_error"
    assert "secret" not in bad.text + streamed.text and '"error"' in streamed.text
    assert good.status_code == 200


def test_what_fails_while_it_is_opened_leaves_nothing_behind(server, talk, monkeypatch):
    app, opened = create_app(server, model_name="m"), server.open

    def second_fails(prompt, *args, **options):
        if prompt == [9, 9]:
            raise RuntimeError("can't start new thread")
        return opened(prompt, *args, **options)

    monkeypatch.setattr(server, "open", second_fails)

    async def conversation(http):
        return await http.post(
            "/v1/completions", json=ASKED | {"prompt": [[5, 6], [9, 9]], "max_tokens": 200}
        )

    assert talk(app, conversation).status_code == 500
    assert app.service._held == 0 and not app.service._live
    end = time.monotonic() + 5
    while server.engine.busy and time.monotonic() < end:
        time.sleep(0.01)
    assert not server.engine.busy and server.engine.steps < 150


def test_nothing_new_is_taken_while_it_drains(server, talk):
    app = create_app(server, model_name="m")
    app.service.drain()

    async def conversation(http):
        return await http.get("/health"), await http.post("/v1/completions", json=ASKED)

    health, refused = talk(app, conversation)
    assert health.json() == {"status": "draining"} and health.status_code == 503
    assert refused.status_code == 503 and refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "shutting_down"


def test_a_body_has_its_time(server, talk):
    app = create_app(server, model_name="m", body_timeout_s=0.1)

    async def slow():
        yield b'{"model": '
        await asyncio.sleep(0.4)
        yield b'"m"}'

    async def conversation(http):
        return await http.post("/v1/completions", content=slow())

    answer = talk(app, conversation)
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "body_timeout"


def test_a_client_that_does_not_read_is_let_go(server):
    """The engine goes on without it, and its pages are free."""
    app, taken = create_app(server, model_name="m", send_timeout_s=0.1), []

    async def run():
        body = b'{"model": "m", "prompt": [5, 6], "max_tokens": 200, "stream": true}'
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(60)

        async def send(message):
            taken.append(message)
            if len(taken) > 2:
                await asyncio.sleep(60)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
        with pytest.raises(Exception):  # noqa: B017 - whatever has uvicorn close the connection
            await app(scope, receive, send)

    start = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - start < 20 and not app.service._live
    while server.engine.busy:
        time.sleep(0.01)
    assert server.engine.pool.used_pages == server.stats()["cached_pages"]
