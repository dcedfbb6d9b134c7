"""process.py: how a server process ends, and what it says before it begins."""

import json
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from live import Live, folder

DRAIN_S = 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("served") / "model")


def stream(url, found, started, **body):
    asked = {"model": "model", "prompt": "hello the world", "stream": True, "ignore_eos": True} | body
    with httpx.stream("POST", url + "/v1/completions", json=asked, timeout=60) as answer:
        for line in answer.iter_lines():
            if line:
                found.append(line.removeprefix("data: "))
                started.set()


def test_sigterm_lets_streams_end_and_ends_what_is_left(model):
    live = Live(model, "--recipe", "int8", "--pages", "3000", "--drain", str(DRAIN_S))
    short, long, began = [], [], [threading.Event(), threading.Event()]
    threads = [
        threading.Thread(
            target=stream, args=(live.url, long, began[0]), kwargs={"max_tokens": 4000, "n": 10}
        ),
        threading.Thread(target=stream, args=(live.url, short, began[1]), kwargs={"max_tokens": 30}),
    ]
    for thread in threads:
        thread.start()
    assert all(event.wait(30) for event in began)
    live.process.send_signal(signal.SIGTERM)
    end, refused = time.monotonic() + 10, False
    while not refused and time.monotonic() < end and live.process.poll() is None:
        try:
            body = {"model": "model", "prompt": "x", "max_tokens": 1}
            refused = httpx.post(live.url + "/v1/completions", json=body).status_code == 503
        except httpx.TransportError:
            refused = True
    assert refused
    for thread in threads:
        thread.join(40)
    assert live.stop() == 0
    assert short[-1] == "[DONE]" and json.loads(short[-2])["choices"][0]["finish_reason"] == "length"
    assert long[-1] == "[DONE]" and json.loads(long[-2])["error"]["code"] == "shutting_down"
    assert live.of("draining") and live.of("stopped")


def test_a_second_signal_does_not_wait_and_a_killed_server_leaves_the_port(model):
    live = Live(model, "--recipe", "int8", "--pages", "3000", "--drain", "60")
    found, began = [], threading.Event()
    thread = threading.Thread(target=_quietly, args=(live.url, found, began), daemon=True)
    thread.start()
    assert began.wait(30)
    live.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert live.process.poll() is None
    assert live.stop(signal.SIGTERM) == 0
    thread.join(10)
    assert not thread.is_alive()


def _quietly(url, found, began):
    try:
        stream(url, found, began, max_tokens=4000, n=10)
    except httpx.TransportError:
        pass


def run(*args):
    command = [sys.executable, "-m", "hfaccel.cli", "serve", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_what_cannot_be_served_is_told_in_one_line(model):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(str(model), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1 and "cannot listen on 127.0.0.1:" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
