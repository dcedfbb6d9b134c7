"""OpenAI's API over a `Server`.

app = create_app(server, model_name="demo")    # an ASGI application; `process.serve` runs it with uvicorn
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import struct
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from hfaccel.errors import PatchError
from hfaccel.serve import protocol
from hfaccel.serve.access import Access
from hfaccel.serve.answers import choices_of
from hfaccel.serve.asked import chat_of, completion_of, told
from hfaccel.serve.errors import ApiError, of_validation
from hfaccel.serve.metrics import CONTENT_TYPE
from hfaccel.serve.page import index
from hfaccel.serve.server import Server
from hfaccel.serve.service import Bounds, Service, tell
from hfaccel.serve.streaming import EventStream, watched

MOST_INPUTS = 2048  # of one request for embeddings, as OpenAI has it


def create_app(
    server: Server,
    *,
    model_name: str,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = Bounds.max_body_bytes,
    max_queue: int = Bounds.max_queue,
    request_timeout_s: float = Bounds.request_timeout_s,
    send_timeout_s: float = Bounds.send_timeout_s,
    body_timeout_s: float = Bounds.body_timeout_s,
    stall_s: float = Bounds.stall_s,
    lora_dir: str | Path | None = None,
) -> Access:
    """The ASGI application. Its `service` drains and says how the engine is.

    Args:
        model_name: what requests call the base; adapters are models by their own names.
        api_keys: one of them must come with each request but /health, /metrics and /version; none: no key.
        max_body_bytes, max_queue, request_timeout_s, send_timeout_s, body_timeout_s, stall_s: see `Bounds`.
        lora_dir: the folder that adapters may be loaded from by request.
    """
    bounds = Bounds(max_queue, request_timeout_s, send_timeout_s, body_timeout_s, max_body_bytes, stall_s)
    service = Service(server, model_name, bounds, lora_dir)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        watch = asyncio.create_task(service.watch())
        yield
        watch.cancel()
        service.close()

    app = FastAPI(title="hfaccel", version=version("hfaccel"), lifespan=lifespan)

    def failed(request: Request, error: ApiError) -> JSONResponse:
        service.refused(request.url.path, request.state.request_id, error)
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(ApiError)
    async def _refused(request: Request, error: ApiError):
        return failed(request, error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError):
        return failed(request, of_validation(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException):
        said = {
            404: f"there is no {request.url.path}",
            405: f"{request.url.path} does not take {request.method}",
        }
        message = said.get(error.status_code, str(error.detail))
        return failed(request, ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def _broken(request: Request, error: Exception):
        return failed(request, ApiError(500, f"the server failed: {type(error).__name__}"))

    _generation(app, service)
    _models(app, service)
    _operation(app, service)
    return Access(app, service, api_keys)


def _record(request: Request, body: Any, answers: int) -> dict[str, Any]:
    """What the log says of a request: no word of its texts."""
    return {
        "id": request.state.request_id,
        "path": request.url.path,
        "client": request.client.host if request.client else None,
        "model": body.model,
        "answers": answers,
        "stream": bool(getattr(body, "stream", False)),
    }


def _generation(app: FastAPI, service: Service) -> None:
    async def answered(request: Request, body, asked) -> Response | EventStream:
        shared = service.shared_tokens
        choices = choices_of(asked.prompts, asked.n, asked.options, shared, asked.constraint)
        record = _record(request, body, len(choices))
        answers = service.begin(choices, record, asked.field)
        try:
            form = asked.form(answers)
            if body.stream:
                return EventStream(answers, form, service.bounds.send_timeout_s)
            async with watched(request.receive, answers):
                await answers.all()
            return JSONResponse(form.whole())
        except BaseException:
            answers.close()
            raise

    @app.post("/v1/completions")
    async def completions(request: Request, body: protocol.CompletionRequest):
        return await answered(request, body, await completion_of(service, body))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: protocol.ChatRequest):
        return await answered(request, body, await chat_of(service, body))

    @app.post("/v1/embeddings")
    async def embeddings(request: Request, body: protocol.EmbeddingRequest):
        adapter = service.adapter_of(body.model)
        width = service.server.engine.model.config.get_text_config(decoder=True).hidden_size
        if body.dimensions is not None and body.dimensions != width:
            raise ApiError(400, f"dimensions is {width} for this model", param="dimensions")
        service.check_priority(body.priority)
        if len(body.input) > MOST_INPUTS:
            raise ApiError(400, f"{len(body.input)} inputs; one request has {MOST_INPUTS}", param="input")
        prompts = await service.ids_of(body.input, special=body.add_special_tokens, param="input")
        for prompt in prompts:
            service.room(prompt, None, "input", source="input", least=0)
        options = {"embed": True, "max_new_tokens": 1, "priority": body.priority}
        options |= {} if adapter is None else {"adapter": adapter}
        rows, at_once = [], service.server.engine.limits.max_running  # others find a place between
        for begin in range(0, len(prompts), at_once):
            choices = choices_of(prompts[begin : begin + at_once], 1, options, service.shared_tokens)
            answers = service.begin(choices, _record(request, body, len(choices)), "input")
            async with watched(request.receive, answers):
                await answers.all()
            rows += [choice.opened.request.embedding for choice in choices]
        if body.normalize:
            rows = [row / row.norm().clamp_min(1e-12) for row in rows]
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(row.tolist(), body.encoding_format)}
            for index, row in enumerate(rows)
        ]
        count = sum(map(len, prompts))
        used = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": used})


def _vector(values: list[float], form: str) -> list[float] | str:
    """As numbers, or as OpenAI's base64 of little-endian fp32."""
    return values if form == "float" else base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _models(app: FastAPI, service: Service) -> None:
    def model(name: str, **more: Any) -> dict[str, Any]:
        said = {"id": name, "object": "model", "created": service.started, "owned_by": "hfaccel"}
        return said | {"max_model_len": service.max_tokens} | more

    @app.get("/v1/models")
    async def models():
        base = service.model_name
        found = [model(base, root=base, parent=None)]
        for name, path in sorted(service.server.adapters().items()):
            found.append(model(name, root=Path(path).name, parent=base))
        return {"object": "list", "data": found}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str):
        adapter = service.adapter_of(name)
        return model(name, parent=None if adapter is None else service.model_name)

    @app.post("/v1/load_lora_adapter")
    async def load(body: protocol.LoadAdapter):
        path, name = service.adapter_path(body.lora_path), body.lora_name
        known = service.server.adapters()
        if name == service.model_name:
            raise ApiError(400, f"{name!r} is the base model's name", param="lora_name")
        if name in known and not body.load_inplace:
            said = f"{name!r} is loaded already; load_inplace: true replaces it"
            raise ApiError(400, said, param="lora_name", code="adapter_loaded")
        try:
            await asyncio.to_thread(service.server.load_adapter, name, path)
        except PatchError as error:
            raise ApiError(400, str(error), param="lora_path") from error
        service.metrics.loads.inc()
        tell("adapter loaded", adapter=name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: protocol.UnloadAdapter):
        if body.lora_name not in service.server.adapters():
            raise ApiError(404, f"no adapter {body.lora_name!r} is loaded", param="lora_name")
        await asyncio.to_thread(service.server.unload_adapter, body.lora_name)
        tell("adapter unloaded", adapter=body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _operation(app: FastAPI, service: Service) -> None:
    page, page_headers = index()

    @app.get("/", include_in_schema=False)
    async def show_page():
        return Response(page, headers=page_headers)

    @app.get("/health")
    async def health():
        state = "draining" if service.draining else service.state()
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/version")
    async def show_version():
        return {"version": version("hfaccel")}

    @app.get("/metrics")
    async def metrics():
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest):
        if body.model is not None:
            service.adapter_of(body.model)
        if body.prompt is not None:
            (ids,) = await service.ids_of([body.prompt], special=body.add_special_tokens)
        else:
            how = {"add_generation_prompt": body.add_generation_prompt}
            ids = await service.ids_of_messages(list(map(told, body.messages)), **how)
        found = {"count": len(ids), "max_model_len": service.max_tokens, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [service.pieces[token][0] for token in ids]
        return found

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest):
        if body.model is not None:
            service.adapter_of(body.model)
        if service.tokenizer is None:
            raise ApiError(400, "the server has no tokenizer", param="tokens")
        wrong = next((token for token in body.tokens if token >= len(service.tokenizer)), None)
        if wrong is not None:
            raise ApiError(400, f"tokens: {wrong} is not in the tokenizer's vocabulary", param="tokens")
        return {"prompt": service.tokenizer.decode(body.tokens)}
