"""measure/peers/traffic.py: the closed loop, Poisson times, engines that are stepped, and servers by URL."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hfaccel.measure.peers.traffic import Stepper, Url, drive


class Counted:
    """A target whose requests end when it is told; `most` is how many there were at once."""

    def __init__(self):
        self.open, self.most, self.sent = 0, 0, []
        self.lock = threading.Lock()

    def send(self, job, record):
        with self.lock:
            self.open += 1
            self.most = max(self.most, self.open)
            self.sent.append(job)
        threading.Timer(0.01, self.end, (record,)).start()

    def end(self, record):
        record.came(record.job["new_tokens"])
        with self.lock:
            self.open -= 1
        record.over()


def jobs(count, new=2, **more):
    return [{"prompt": [1, n], "new_tokens": new, **more} for n in range(count)]


def test_a_closed_loop_has_as_many_requests_as_users():
    target = Counted()
    records = drive(target, jobs(12), users=3)
    assert target.most == 3 and len(records) == 12
    assert all(record["error"] is None and record["tokens"] == 2 for record in records)
    assert all(record["times"][0] >= record["at"] for record in records)


def test_requests_with_a_time_are_sent_then_whatever_runs():
    target = Counted()
    given = [{**job, "at": at} for job, at in zip(jobs(5), (0, 0, 0, 0.02, 0.03), strict=True)]
    records = drive(target, given, users=1)
    assert target.most >= 3
    assert all(record["at"] >= job["at"] for record, job in zip(records, given, strict=True))


def test_who_never_ends_is_an_error_and_no_hang():
    class Silent:
        def send(self, job, record):
            pass

    with pytest.raises(TimeoutError, match="1 requests did not end"):
        drive(Silent(), jobs(1), users=1, timeout_s=0.05)
    with pytest.raises(TimeoutError, match="no request ended"):
        drive(Silent(), jobs(2), users=1, timeout_s=0.05)


def test_too_few_tokens_are_an_error():
    class Short:
        def send(self, job, record):
            record.came()
            record.over()

    assert drive(Short(), jobs(1, new=3), users=1)[0]["error"] == "1 tokens of 3"


def test_a_stepped_engine_gives_each_request_its_own_tokens():
    """Requests of other lengths join while others run; pieces may be of several tokens."""
    left, batches = {}, []

    def add(number, job):
        left[number] = job["new_tokens"]

    def step():
        time.sleep(0.001)
        batches.append(len(left))
        for number in list(left):
            count = min(2, left[number])
            left[number] -= count
            yield number, count, not left[number]
            if not left[number]:
                del left[number]

    given = [{"prompt": [1], "new_tokens": n} for n in (1, 5, 8, 3)]
    records = drive(Stepper(add, step), given, users=2)
    assert [record["tokens"] for record in records] == [1, 5, 8, 3]
    assert [len(record["times"]) for record in records] == [1, 3, 4, 2]
    assert max(batches) == 2 and not left


def test_an_engine_that_fails_fails_its_requests_and_takes_new_ones():
    broken = [True]
    running = []

    def step():
        if broken[0]:
            broken[0] = False
            running.clear()
            raise ValueError("no memory")
        return [(number, 2, True) for number in running]

    target = Stepper(lambda number, job: running.append(number), step)
    assert drive(target, jobs(1), users=1)[0]["error"] == "ValueError: no memory"
    assert drive(target, jobs(1), users=1)[0]["error"] is None


class Completions(BaseHTTPRequestHandler):
    """OpenAI's stream, a token a piece; "bad" fails before it begins and "cut" in its middle."""

    protocol_version = "HTTP/1.1"
    asked: list = []

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": "base"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers.get("Authorization"), body))
        if body["model"] == "bad":
            return self.reply(404, {"error": "no such model"})
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = body["max_tokens"]
        for n in range(count):
            self.event({"choices": [{"text": "" if n == 1 else "x", "finish_reason": None}]})
            if body["model"] == "cut":
                self.event({"error": {"message": "out of pages"}})
                self.close_connection = True
                return
        self.event({"choices": [{"text": "", "finish_reason": "length"}]})
        self.event({"choices": [], "usage": {"completion_tokens": count}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def reply(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def event(self, body):
        self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def chunk(self, text):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    Completions.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("end", ["", "/v1", "/v1/"])
def test_a_server_by_url_is_streamed(url, end):
    target = Url(url + end, headers={"Authorization": "Bearer k"})
    records = drive(target, jobs(3, new=4), users=2)
    assert [(r["tokens"], len(r["times"]), r["error"]) for r in records] == [(4, 4, None)] * 3
    path, key, body = Completions.asked[0]
    assert (path, key, body["model"]) == ("/v1/completions", "Bearer k", "base")
    assert body["stream"] and body["ignore_eos"] and body["temperature"] == 0


def test_an_adapter_is_asked_for_as_the_model(url):
    drive(Url(url), jobs(1, adapter="sql"), users=1)
    assert Completions.asked[0][2]["model"] == "sql"


def test_what_a_server_refuses_or_breaks_off_is_the_requests_error(url):
    bad, cut = (drive(Url(url, name), jobs(1), users=1)[0]["error"] for name in ("bad", "cut"))
    assert "404" in bad and "no such model" in bad
    assert "out of pages" in cut


def test_a_server_that_is_not_there_is_refused_at_once():
    with pytest.raises(OSError):
        Url("http://127.0.0.1:1")
