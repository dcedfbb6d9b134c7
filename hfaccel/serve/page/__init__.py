"""The page at `/`: one file, sent with a policy that lets nothing in but the file's own script and style.

The policy names both by their digests, so that text that a model wrote, were it ever taken for markup, could
run nothing, load nothing and send nothing anywhere; `require-trusted-types-for` has the browser refuse to
take text for markup at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files


def index() -> tuple[bytes, dict[str, str]]:
    """The page, and the headers that it is sent with."""
    body = files(__name__).joinpath("index.html").read_bytes()
    policy = [
        "default-src 'none'",
        f"script-src {_digests(body, b'script')}",
        f"style-src {_digests(body, b'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return body, headers


def _digests(body: bytes, tag: bytes) -> str:
    found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), body, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
