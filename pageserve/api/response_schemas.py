"""The bodies of successful answers, for /openapi.json only: nothing is built from these models.

Members that a request has to ask for have a default; no others may appear.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CachedTokens(_Body):
    cached_tokens: int


class ReasoningTokens(_Body):
    reasoning_tokens: int


class Usage(_Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatUsage(Usage):
    completion_tokens_details: ReasoningTokens


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(_Body):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    tool_calls: list[ToolCall] = []
    reasoning_content: str = ""
    reasoning: str = ""


class Alternative(_Body):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenEntry(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(_Body):
    content: list[TokenEntry]
    refusal: None


class CompletionLogprobs(_Body):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(_Body):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class _Choice(_Body):
    index: int
    stop_reason: int | str | None
    token_ids: list[int] = []


class ChatChoice(_Choice):
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class _Reply(_Body):
    id: str
    created: int
    model: str
    system_fingerprint: str
    timings: dict[str, Any] = {}


class ChatCompletion(_Reply):
    """The answer of /v1/chat/completions without stream."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsage
    service_tier: None
    prompt_token_ids: list[int] = []
    prompt_text: str = ""
    prompt_logprobs: PromptLogprobs = []


class Completion(_Reply):
    """The answer of /v1/completions without stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class Model(_Body):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[Any]


class ModelList(_Body):
    """The served names, the default first."""

    object: Literal["list"]
    data: list[Model]


class Piece(_Body):
    id: int
    piece: str | list[int]


class Tokens(_Body):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int] | list[Piece]
    token_strs: list[str] | None


class Text(_Body):
    """The answer of /detokenize: one text under three names."""

    prompt: str
    content: str
    text: str


class PromptText(_Body):
    """The answer of /apply-template."""

    prompt: str


class Load(_Body):
    """How busy the engine is."""

    running: int
    waiting: int
    waiting_tokens: int
    kv_usage: float
    server_load: int


class Status(_Body):
    """The answer of a probe."""

    status: str


class Version(_Body):
    version: str
