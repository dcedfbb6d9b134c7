"""What tests of the server share: a tiny patched model, and HTTP to an application in this process."""

import asyncio

import httpx
import pytest

from engines import patched


@pytest.fixture(scope="module")
def model():
    return patched()


@pytest.fixture
def strict(monkeypatch):
    """Another executor than the one that is meant is an error."""
    monkeypatch.setenv("HFACCEL_STRICT", "1")


@pytest.fixture(scope="session")
def talk():
    """`talk(app, conversation)` runs `await conversation(http)`, with `http` speaking to `app`."""

    def talk(app, conversation):
        async def run():
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as http:
                return await conversation(http)

        return asyncio.run(run())

    return talk
