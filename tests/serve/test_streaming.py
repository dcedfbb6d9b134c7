"""streaming.py: events that every client cuts at the same places."""

import json

from hfaccel.serve.streaming import event


def test_an_event_is_one_line_by_any_rule():
    text = "a\nb\rc\u0085d\u2028e\u2029f\x1cg 在😀 \ud83d"
    data = event({"text": text})
    assert data.endswith(b"\n\n") and data.decode().splitlines() == [data.decode()[:-2], ""]
    assert json.loads(data.removeprefix(b"data: ")) == {"text": text}
