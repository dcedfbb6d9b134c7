"""Requests sent as users send them, and when each of their tokens came. Standard library alone: every
contender's process runs this file, so that all are timed by the same lines.

A job is a dict: "prompt" (token ids), "new_tokens", and where it has them "adapter" (a name) and "at"
(seconds after the start at which it is sent, whatever runs). A target has `send(job, record)`, which begins
a request and returns at once; it calls `record.came()` for tokens and `record.over()` once at the end, from
any thread.
"""

import contextlib
import ctypes
import http.client
import json
import signal
import threading
import time
import urllib.parse

TIMEOUT_S = 600
_PR_SET_PDEATHSIG = 1


def die_with_parent():
    """On Linux this process is killed as soon as the one that started it is gone, however that went: nobody
    else would end it, and a stopped one would stay for good."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Record:
    """What became of one job: seconds after the start, of its sending and of each piece of its answer.

    Attributes: tokens: how many came in all, more than `times` where a server sends several at once.
    """

    def __init__(self, job, start, ended):
        self.job, self.start, self._ended = job, start, ended
        self.at = time.perf_counter() - start
        self.times, self.tokens, self.error = [], 0, None

    def came(self, tokens=1):
        self.times.append(time.perf_counter() - self.start)
        self.tokens += tokens

    def over(self, error=None):
        if error is None and self.tokens != self.job["new_tokens"]:
            error = f"{self.tokens} tokens of {self.job['new_tokens']}"
        self.error = None if error is None else str(error)
        self._ended()

    def to_dict(self):
        made = {"at": self.at, "times": self.times, "tokens": self.tokens, "error": self.error}
        return made | ({"adapter": self.job["adapter"]} if self.job.get("adapter") else {})


def drive(target, jobs, users, timeout_s=TIMEOUT_S):
    """Send all jobs, `users` at once at most or, where they have "at", when it is time; wait for the last.

    Raises: TimeoutError.
    """
    places = threading.Semaphore(users)
    left, done = [len(jobs)], threading.Event()
    counting = threading.Lock()

    def ended():
        places.release()
        with counting:
            left[0] -= 1
            if not left[0]:
                done.set()

    start, records = time.perf_counter(), []
    for job in jobs:
        if job.get("at") is not None:
            time.sleep(max(0.0, start + job["at"] - time.perf_counter()))
        elif not places.acquire(timeout=timeout_s):
            raise TimeoutError(f"no request ended within {timeout_s} s")
        records.append(Record(job, start, ended))
        target.send(job, records[-1])
    if not done.wait(timeout_s):
        raise TimeoutError(f"{left[0]} requests did not end within {timeout_s} s")
    return [record.to_dict() for record in records]


class Stepper:
    """A target over an engine that is stepped by hand, in a thread of its own.

    Args:
        add: called as add(number, job). step: gives (number, new tokens, whether it is over) of each that
            moved.
    """

    def __init__(self, add, step):
        self._add, self._step = add, step
        self._new, self._running = [], {}
        self._wake = threading.Condition()
        self._count = 0
        threading.Thread(target=self._loop, daemon=True).start()

    def send(self, job, record):
        with self._wake:
            self._new.append((job, record))
            self._wake.notify()

    def _loop(self):
        while True:
            with self._wake:
                while not (self._new or self._running):
                    self._wake.wait()
                new, self._new = self._new, []
            try:
                for job, record in new:
                    self._count += 1
                    self._running[self._count] = record
                    self._add(self._count, job)
                for number, tokens, over in self._step():
                    record = self._running[number]
                    if tokens:
                        record.came(tokens)
                    if over:
                        del self._running[number]
                        record.over()
            except Exception as error:  # of the engine: what runs is lost, the next job may do better
                lost, self._running = self._running, {}
                for record in lost.values():
                    record.over(f"{type(error).__name__}: {error}")


class Url:
    """A target behind OpenAI's completions protocol, streamed: a connection and a thread a request.

    Args:
        url: up to and with "/v1". model: what requests ask for where they have no adapter; else the first one
            that the server lists. headers: e.g. an authorization.
    """

    def __init__(self, url, model=None, headers=None):
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        secure = parts.scheme == "https"
        self._connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._place = parts.netloc
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self.model = self._first() if model is None else model

    def _open(self, method, path, body=None):
        connection = self._connect(self._place, timeout=TIMEOUT_S)
        text = None if body is None else json.dumps(body)
        connection.request(method, self._path + path, text, self._headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise OSError(f"{reply.status} {reply.read(500).decode(errors='replace')}")
        return connection, reply

    def _first(self):
        connection, reply = self._open("GET", "/models")
        try:
            return json.load(reply)["data"][0]["id"]
        finally:
            connection.close()

    def send(self, job, record):
        threading.Thread(target=self._run, args=(job, record), daemon=True).start()

    def _run(self, job, record):
        body = {
            "model": job.get("adapter") or self.model,
            "prompt": job["prompt"],
            "max_tokens": job["new_tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            connection, reply = self._open("POST", "/completions", body)
            try:
                self._read(reply, record)
            finally:
                connection.close()
        except Exception as error:  # whatever the other side or the line does is this request's alone
            record.over(f"{type(error).__name__}: {error}")
        else:
            record.over()

    def _read(self, reply, record):
        used = None
        for line in reply:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise OSError(event["error"])
            if event.get("usage"):
                used = event["usage"]["completion_tokens"]
            # A piece without text is a token whose character is not whole yet; the last one only says why.
            if any(c.get("text") or not c.get("finish_reason") for c in event.get("choices") or ()):
                record.came()
        if used is not None:
            record.tokens = used
