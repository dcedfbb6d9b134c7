"""What a request's fields ask of the engine: prompts, options, and the form of the reply."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfaccel.serve.answers import Answers
from hfaccel.serve.errors import ApiError
from hfaccel.serve.protocol import ChatRequest, CompletionRequest, Generation, Message, NamedTool
from hfaccel.serve.replies import ChatForm, CompletionForm, Form
from hfaccel.serve.requests import Constraint
from hfaccel.serve.service import Service
from hfaccel.serve.tools import Calls, calls_schema, dialect_of

# What the fields of a request are called in `Options`, where they are given.
OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop_token_ids": "stop_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
    "priority": "priority",
}
# What `apply_chat_template` takes for itself: another template would run here, a prompt be cut unseen, or a
# field of the request's own be overruled.
NOT_THE_TEMPLATES = frozenset(
    "conversation tools chat_template add_generation_prompt continue_final_message tokenize padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "sanitize_control_tokens".split()
)

COMPLETION_TOKENS = 16  # of a completion that names no max_tokens, as in OpenAI's API


@dataclass
class Asked:
    """Prompts, how many answers of each and how; `field` is where prompts came from, `constraint` makes what
    rules an answer."""

    prompts: list[list[int]]
    n: int
    options: list[dict[str, Any]]
    form: Callable[[Answers], Form]
    field: str = "prompt"
    constraint: Callable[[], Constraint] | None = None


def options_of(service: Service, body: Generation) -> dict[str, Any]:
    """Options that are alike for all prompts; the model's own defaults where a field is not given."""
    service.check_priority(body.priority)
    found = dict(service.defaults)
    for field, option in OPTIONS.items():
        if (value := getattr(body, field)) is not None:
            found[option] = value
    if body.top_k is not None:
        found["top_k"] = max(body.top_k, 0)
    if body.logit_bias:
        found["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.stop:
        found["stop"] = body.stop
    if service.tokenizer is not None:
        found["keep_special"] = not body.skip_special_tokens
        found["keep_stop"] = body.include_stop_str_in_output
    adapter = service.adapter_of(body.model)
    return found if adapter is None else found | {"adapter": adapter}


def _limited(service: Service, prompt: list[int], common: dict[str, Any], asked: int | None, **how) -> dict:
    room = service.room(prompt, asked, **how)
    if common.get("min_tokens", 0) > max(room, 1):
        raise ApiError(
            400, f"min_tokens {common['min_tokens']} is more than max_tokens {room}", param="min_tokens"
        )
    return common | {"max_new_tokens": max(room, 1)}


async def completion_of(service: Service, body: CompletionRequest) -> Asked:
    """Raises: ApiError, as the functions below."""
    common = options_of(service, body)
    n = body.best_of or body.n
    service.check_count(n, "n")
    service.check_count(n * len(body.prompt), "prompt")
    prompts = await service.ids_of(body.prompt, special=body.add_special_tokens)
    dropped = body.max_tokens == 0 and body.echo
    limit = body.max_tokens
    if limit is None:  # a chat ends by itself, what a base model continues may never
        limit = max(COMPLETION_TOKENS, common.get("min_tokens", 0))
    options = [
        _limited(service, prompt, common, limit, field="max_tokens", least=0 if dropped else 1)
        for prompt in prompts
    ]
    scored = body.logprobs is not None
    for field, needs in {"logprobs": scored, "best_of": n > body.n, "echo": body.echo}.items():
        if needs and service.tokenizer is None:
            raise ApiError(400, f"{field} needs a tokenizer, and the server has none", param=field)
    for own in options:
        if scored or n > body.n:
            own["logprobs"] = body.logprobs or 0
        if scored and body.echo:
            own["prompt_logprobs"] = body.logprobs

    def form(answers: Answers) -> Form:  # after the engine has seen the prompts: all their tokens are known
        echoes = None
        if body.echo:
            texts = [
                given if isinstance(given, str) else service.tokenizer.decode(given) for given in body.prompt
            ]
            echoes = [text for text in texts for _ in range(n)]
        return CompletionForm(
            answers,
            body.model,
            service.pieces,
            with_usage=_with_usage(body),
            echoes=echoes,
            scored=scored,
            dropped=dropped,
            best_of=n,
            n=body.n,
        )

    constraint = await structure_of(service, body)
    return Asked(prompts, n, options, form, constraint=constraint)


async def chat_of(service: Service, body: ChatRequest) -> Asked:
    """Raises: ApiError."""
    common = options_of(service, body)
    how: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if taken := how.keys() & NOT_THE_TEMPLATES:
        said = f"chat_template_kwargs has {min(taken)!r}, which is not for a template"
        raise ApiError(400, said, param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        how.setdefault("reasoning_effort", body.reasoning_effort)
    how["add_generation_prompt"] = body.add_generation_prompt
    how["continue_final_message"] = body.continue_final_message
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    messages = [told(message) for message in body.messages]
    prompt = await service.ids_of_messages(messages, tools or None, **how)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    options = _limited(service, prompt, common, body.limit, field=field, source="messages")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0

    constraint, parser = await structure_of(service, body), None
    if body.tools and body.tool_choice != "none":
        constraint, parser = await calls_of(service, body, constraint)

    def form(answers: Answers) -> Form:
        return ChatForm(
            answers,
            body.model,
            service.pieces,
            with_usage=_with_usage(body),
            scored=bool(body.logprobs),
            parser=parser,
        )

    if parser is not None and constraint is None and parser.args[1] == "mistral":
        options["keep_special"] = True  # the mark of a call is one
    return Asked([prompt], body.n, [options], form, "messages", constraint)


async def structure_of(service: Service, body: Generation) -> Callable[[], Constraint] | None:
    """What response_format or structured_outputs ask for. Raises: ApiError."""
    asked = None
    if body.response_format is not None and body.response_format.type == "json_object":
        asked = "json_object", True, "response_format"
    elif body.response_format is not None and body.response_format.type == "json_schema":
        asked = "json", body.response_format.json_schema.definition, "response_format"
    elif body.structured_outputs is not None:
        given = vars(body.structured_outputs)
        name = next(name for name, value in given.items() if value is not None and value is not False)
        asked = name.rstrip("_"), given[name], "structured_outputs"
    if asked is None:
        return None
    if body.min_tokens:
        raise ApiError(400, f"min_tokens and {asked[2]} contradict each other", param="min_tokens")
    return await service.constrained(*asked)


async def calls_of(service: Service, body: ChatRequest, constraint):
    """What rules an answer with tools, and what takes it apart. Raises: ApiError."""
    names = [tool.function.name for tool in body.tools]
    parallel = body.parallel_tool_calls is not False
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    if forced:
        if constraint is not None:
            raise ApiError(400, "tool_choice and response_format contradict each other", param="tool_choice")
        if body.min_tokens:
            raise ApiError(400, "min_tokens and tool_choice contradict each other", param="min_tokens")
        schema = calls_schema(body.tools, body.tool_choice, parallel)
        constraint = await service.constrained("json", schema, "tools")
    elif constraint is not None:  # the answer is what it rules, not a call
        return constraint, None
    dialect = dialect_of(getattr(service.tokenizer, "chat_template", None))
    return constraint, partial(Calls, names, dialect, forced=forced, parallel=parallel)


def told(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: content is text, a call's arguments are an object."""
    found = message.model_dump(exclude_none=True)
    found.setdefault("content", "")  # beside tool calls: templates add it to other texts
    if message.role == "developer":
        found["role"] = "system"
    if isinstance(message.content, list):
        found["content"] = "\n".join(part.text for part in message.content)
    for call in found.get("tool_calls", ()):
        given = call["function"].get("arguments")
        try:
            call["function"]["arguments"] = json.loads(given) if given else {}
        except (ValueError, RecursionError):
            raise ApiError(
                400, f"the arguments of call {call['id']!r} are no JSON", param="messages"
            ) from None
    return found


def _with_usage(body: Generation) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)
