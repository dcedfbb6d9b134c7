"""The fields of each endpoint's request: OpenAI's, and beside them those of vLLM by their names there.

A field that is not known is refused by name. Those that change nothing here (`user`, `metadata`, ...) are
taken; those that ask for what the server cannot do are refused unless they ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from hfaccel.serve.requests import MOST_LOGPROBS

MOST_CHOICES = 128  # as OpenAI has it
MOST_TOP_LOGPROBS = 20
TOKEN_MOST = 2**63 - 1

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=TOKEN_MOST)]


def is_unicode(text: str) -> bool:
    """Whether it can be sent and tokenized: JSON's escapes can say half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unicode(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("a text is valid Unicode, without single surrogates")
    return text


Unicode = Annotated[str, AfterValidator(_unicode)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # changes nothing here


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, serialize_by_alias=True)
    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self):
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.definition is None):
            raise ValueError("json_schema needs json_schema.schema")
        return self


class StructuredOutputs(Body):
    """One of them, as vLLM's field of this name."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self):
        given = [value for value in vars(self).values() if value is not None and value is not False]
        if len(given) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar, json_object")
        return self


class Generation(Body):
    """What completions and chat have in common."""

    model: str
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=TOKEN_MOST)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    user: str | None = None  # these change nothing here
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, bias):
        for key in bias or {}:
            if not key.isascii() or not key.isdigit() or len(key) > 18:
                raise ValueError(f"keys are token ids, not {key[:40]!r}")
        return bias

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, stop):
        stops = [stop] if isinstance(stop, str) else stop or []
        if not all(stops):
            raise ValueError("a stop string is not empty")
        return stops

    @model_validator(mode="after")
    def _streams(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        asked = "text" if self.response_format is None else self.response_format.type
        if self.structured_outputs is not None and asked != "text":
            raise ValueError("structured_outputs and response_format are two ways to ask for one thing")
        return self


class CompletionRequest(Generation):
    prompt: Any
    max_tokens: Count | None = None
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    suffix: None = None  # no model here fills in the middle
    add_special_tokens: bool = True

    @field_validator("prompt")
    @classmethod
    def _is_a_prompt(cls, prompt):
        return prompts_of(prompt)

    @model_validator(mode="after")
    def _adds_up(self):
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} is less than n {self.n}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of above n cannot be streamed: the best is known at the end")
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    name: str
    arguments: str | None = None


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """What a client got back it may send again: fields that a reply has beside these are passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self):
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role} has content")
        return self


class FunctionDefinition(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None  # a hint, which templates may read
    verbosity: None = None

    @model_validator(mode="after")
    def _adds_up(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required":
            if not self.tools:
                raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools]
            if self.tool_choice.function.name not in names:
                raise ValueError(
                    f"tool_choice names {self.tool_choice.function.name!r}; tools are {', '.join(names)}"
                )
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two of them have one name")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class EmbeddingRequest(Body):
    model: str
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = False
    add_special_tokens: bool = True
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    user: str | None = None

    @field_validator("input")
    @classmethod
    def _is_an_input(cls, given):
        return prompts_of(given)


class LoadAdapter(Body):
    lora_name: Annotated[Unicode, Field(min_length=1, max_length=256)]
    lora_path: Annotated[Unicode, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapter(Body):
    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: int | None = None


class TokenizeRequest(Body):
    """A prompt, or messages."""

    model: str | None = None
    prompt: Unicode | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one(self):
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages, one of them")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[Count]


def prompts_of(given: Any) -> list[str] | list[list[int]]:
    """Prompts of a text, texts, token ids, or lists of token ids. Raises: ValueError."""
    for text in [given] if isinstance(given, str) else given if isinstance(given, list) else ():
        if isinstance(text, str):
            _unicode(text)
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise ValueError("a text, a list of texts, token ids, or a list of lists of token ids, not empty")
    if all(isinstance(one, str) for one in given):
        return given
    if all(map(_is_token, given)):
        return [given]
    if all(isinstance(one, list) and one and all(map(_is_token, one)) for one in given):
        return given
    raise ValueError("a text, a list of texts, token ids, or a list of lists of token ids, none empty")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
