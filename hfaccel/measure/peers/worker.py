"""One contender in a process of its own: `python worker.py NAME SPEC-AS-JSON`.

Loads `peer_NAME.load(spec)`, says what it is, then answers each line `{"prompt": [[ids]], "new_tokens": n}`
with `{"first_s", "total_s"}`, one greedy run of exactly n tokens a row. With "logits" in the spec it is
`peer_NAME.scorer(spec)` that is loaded, and each line `{"ids": [...], "to": file}` is answered with
`{"shape": [T, V]}` once the file has the logits in fp32. With "serve" it is `peer_NAME.server(spec)`, a
target of `traffic`, and each line `{"jobs": [...], "users": n}` is answered with `{"records": [...]}`.
Standard library alone outside of the peer, since the peer's environment is another one than ours.
"""

import importlib
import json
import os
import sys
import time

import traffic


def main() -> None:
    traffic.die_with_parent()
    name, spec = sys.argv[1], json.loads(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the replies

    def reply(message: dict) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        start = time.perf_counter()
        peer = importlib.import_module(f"peer_{name}")
        kind = "scorer" if spec.get("logits") else "server" if spec.get("serve") else "load"
        run, info = getattr(peer, kind)(spec)
        reply({"info": info, "load_s": time.perf_counter() - start})
        for line in sys.stdin:
            job = json.loads(line)
            if spec.get("serve"):
                reply({"records": traffic.drive(run, job["jobs"], job["users"])})
                continue
            if spec.get("logits"):
                logits = run(job["ids"])
                logits.astype("float32", copy=False).tofile(job["to"])
                reply({"shape": logits.shape})
                continue
            first, total = run(job["prompt"], job["new_tokens"])
            reply({"first_s": first, "total_s": total})
    except Exception as error:  # whatever a peer raises becomes its row in the table
        reply({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
