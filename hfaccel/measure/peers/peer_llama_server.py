"""llama.cpp's own server with a slot a user: `variant` names the GGUF type of `artifact`."""

import os
import socket
import subprocess
import time
import urllib.request

import traffic

START_S = 120


def server(spec):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slots, context = spec["users"], spec["users"] * (spec["most_tokens"] + 8)
    threads = str(spec["threads"])
    words = [spec["program"], "-m", spec["artifact"], "--host", "127.0.0.1", "--port", str(port)]
    words += ["-np", str(slots), "-c", str(context), "-t", threads, "-tb", threads]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=traffic.die_with_parent
    )
    end = time.monotonic() + START_S
    while not _ready(port):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise OSError(f"{spec['program']} did not start")
        time.sleep(0.2)
    said = subprocess.run([spec["program"], "--version"], capture_output=True, text=True)
    lines = (said.stderr + said.stdout).splitlines()
    version = next((line for line in lines if line.startswith("version")), "unknown")
    info = {"version": version, "file_bytes": os.path.getsize(spec["artifact"])}
    return traffic.Url(f"http://127.0.0.1:{port}/v1", spec["variant"]), info


def _ready(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False
