"""Request bodies of the API: fields, types and ranges. Replies are written by hand elsewhere.

Types are strict: ``true`` is no integer and ``"0.7"`` no number, but ``1.0`` is an integer. A null
means "not given" and never reaches the models. Fields that change the meaning of a reply and are
not built are refused by :func:`refuse_unsupported`; the rest of the unknown ones are reported.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pageserve.api.chat import SERVER_OWNED
from pageserve.api.errors import APIError, bad_request, from_validation_error, invalid, quote
from pageserve.api.message_protocol import Messages
from pageserve.api.structured_output import ConstrainedFields, constraint_of, drop_nulls
from pageserve.api.tool_protocol import Choice, ToolChoice, Tools, resolve_choice
from pageserve.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS

MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024  # of one request
MAX_BEST_OF = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_CHARS = 1024
MAX_TEMPLATE_CHARS = 65536


def _integral(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _stop(value: Any) -> Any:
    if isinstance(value, str):
        _check_length(value, MAX_STOP_CHARS, "")
        return [value]
    if not isinstance(value, list):
        invalid("invalid_type", f"stop: must be a string or an array, got {quote(value)}")
    if len(value) > MAX_STOP_STRINGS:
        invalid("array_above_max_length", f"stop takes at most {MAX_STOP_STRINGS} strings")
    for i, item in enumerate(value):
        if not isinstance(item, str):
            invalid("invalid_type", f"stop[{i}]: must be a string, got {quote(item)}", f"[{i}]")
        _check_length(item, MAX_STOP_CHARS, f"[{i}]")
    return value


def _check_length(text: str, most: int, path: str) -> None:
    if not text:
        invalid("string_below_min_length", "the string must not be empty", path)
    if len(text) > most:
        invalid("string_above_max_length", f"the string has more than {most} characters", path)


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        invalid("invalid_type", f"logit_bias: must be an object, got {quote(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        invalid("array_above_max_length", f"logit_bias takes at most {MAX_LOGIT_BIAS} entries")
    return {_token_id_key(key): _bias(key, bias) for key, bias in value.items()}


def _token_id_key(key: str) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        invalid("invalid_type", f"logit_bias: the key {quote(key)} is no token id")
    return int(key)


def _bias(key: str, bias: Any) -> float:
    if type(bias) not in (int, float):
        invalid("invalid_type", f"logit_bias: the value of {quote(key)} is no number")
    if not -100 <= bias <= 100:
        code = "decimal_above_max_value" if bias > 0 else "decimal_below_min_value"
        invalid(code, f"logit_bias: the value of {quote(key)} is outside -100 to 100")
    return float(bias)


def _prompts(value: Any) -> Any:
    """Turn the four shapes of a prompt into a list of strings and id lists."""
    if not isinstance(value, str | list):
        invalid("invalid_type", f"prompt: must be a string or an array, got {quote(value)}")
    paths = [""]
    if isinstance(value, str) or (value and not isinstance(value[0], str | list)):
        value = [value]
    else:
        paths = [f"[{i}]" for i in range(min(len(value), MAX_PROMPTS))]
    if not value:
        invalid("empty_array", "prompt must not be empty")
    if len(value) > MAX_PROMPTS:
        invalid("array_above_max_length", f"prompt takes at most {MAX_PROMPTS} prompts")
    kind = type(value[0])
    for item, path in zip(value, paths, strict=True):
        if type(item) is not kind:
            invalid("invalid_type", "prompt mixes text and token ids", path)
        _check_prompt(item, path)
    return value


def _check_prompt(item: str | list[Any], path: str) -> None:
    if not item:
        code = "string_below_min_length" if isinstance(item, str) else "empty_array"
        invalid(code, "a prompt must not be empty", path)
    if isinstance(item, list):
        try:  # in C: there may be a hundred thousand ids
            msgspec.convert(item, list[int])
        except msgspec.ValidationError:
            wrong = next(x for x in item if type(x) is not int)
            invalid("invalid_type", f"a prompt has {quote(wrong)} where a token id belongs", path)


def _cache_salt(value: Any) -> Any:
    if isinstance(value, str) and (not 1 <= len(value) <= 128 or any(c in value for c in "@/\\\0")):
        invalid("invalid_value", "cache_salt takes 1 to 128 characters other than @, /, \\ and NUL")
    return value


def _template_kwargs(value: Any) -> Any:
    for name in SERVER_OWNED:
        if isinstance(value, dict) and name in value:
            invalid("invalid_value", f"chat_template_kwargs must not set {name}", f".{name}")
    return value


Int = Annotated[int, BeforeValidator(_integral)]
ChatTemplate = Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)]
Label = Annotated[str, Field(max_length=512)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenIds = Annotated[list[Int], Field(max_length=1_000_000)]


# --- known to the contract, not built -------------------------------------------------------------

_NOTHING: tuple[Any, ...] = ()
# Field → values that ask for nothing (beside null). Any other value is refused, never ignored.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
}
_NEUTRAL_CHAT = _NEUTRAL | {
    "functions": _NOTHING,
    "function_call": _NOTHING,
    "modalities": (["text"],),
    "audio": _NOTHING,
    "web_search_options": _NOTHING,
    "moderation": _NOTHING,
    "echo": (False,),
}


# --- bodies ---------------------------------------------------------------------------------------


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # see refuse_unsupported

    @property
    def checked(self) -> Set[str]:
        """Names of fields that are known but not built."""
        return self.neutral.keys()


class StreamOptions(BaseModel):
    """What a stream says beside its text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _needs_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            invalid(
                "invalid_value",
                "continuous_usage_stats needs include_usage",
                ".continuous_usage_stats",
            )
        return self


class GenerationRequest(ConstrainedFields, _Body):
    """Fields that both generating endpoints share. None means: the server's default."""

    model: str = ""
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    n: Annotated[Int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: (
        Annotated[
            dict[int, float], BeforeValidator(_logit_bias, json_schema_input_type=dict[str, float])
        ]
        | None
    ) = None
    stop: Annotated[list[str], BeforeValidator(_stop, json_schema_input_type=str | list[str])] = []
    stream: bool = False
    return_progress: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(drop_nulls)] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Int], Field(max_length=64)] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=64)
    ] = []
    allowed_token_ids: Annotated[list[Int], Field(min_length=1)] | None = None
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)] = 0
    cache_salt: Annotated[str, BeforeValidator(_cache_salt)] | None = None
    deadline_ms: Annotated[Int, Field(ge=1, le=86_400_000)] | None = None
    request_id: Annotated[str, Field(max_length=128)] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check_conflicts(self) -> None:
        """Refuse fields that contradict each other; raises :class:`APIError`."""
        constraint_of(self)
        if self.stream_options is not None and not self.stream:
            raise bad_request(
                "invalid_value", "stream_options needs stream to be true", "stream_options"
            )
        if self.return_progress and not self.stream:
            text = "return_progress needs stream to be true"
            raise bad_request("invalid_value", text, "return_progress")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "invalid_value", "prompt_logprobs does not go with stream", "prompt_logprobs"
            )


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    neutral = _NEUTRAL_CHAT

    messages: Messages
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tools: Tools | None = None
    tool_choice: Choice | None = None
    return_prompt_text: bool = False
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_kwargs)] = {}
    documents: list[dict[str, str]] | None = None

    @property
    def max_tokens_field(self) -> str:
        """Name of the field that sets the output limit."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check_conflicts(self) -> None:
        """Refuse fields that contradict each other; raises :class:`APIError`."""
        super().check_conflicts()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("invalid_value", "top_logprobs needs logprobs: true", "top_logprobs")
        resolve_choice(self.tools, self.tool_choice)

    @property
    def tool_use(self) -> ToolChoice:
        """What the model may do with the tools."""
        return resolve_choice(self.tools, self.tool_choice)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    neutral = _NEUTRAL

    prompt: Annotated[
        list[Any],
        BeforeValidator(
            _prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[Int, Field(ge=1, le=MAX_BEST_OF)] | None = None
    suffix: str = ""  # an empty one asks for nothing
    add_special_tokens: bool = True

    def check_conflicts(self) -> None:
        """Refuse fields that contradict each other; raises :class:`APIError`."""
        super().check_conflicts()
        best_of = self.best_of or self.n
        if best_of < self.n:
            text = f"best_of must be at least n, {self.n}, got {best_of}"
            raise bad_request("integer_below_min_value", text, "best_of")
        if best_of > self.n and self.stream:
            text = "best_of above n does not go with stream: the best are known at the end"
            raise bad_request("invalid_value", text, "best_of")
        if len(self.prompt) * best_of > MAX_SEQUENCES:
            text = f"prompts times the larger of n and best_of must be at most {MAX_SEQUENCES}"
            raise bad_request("invalid_value", text, "n")
        if self.max_tokens == 0 and not self.echo:
            text = "max_tokens must be at least 1, or 0 with echo: true"
            raise bad_request("integer_below_min_value", text, "max_tokens")
        if self.suffix and (
            self.echo
            or self.truncate_prompt_tokens is not None
            or not isinstance(self.prompt[0], str)
        ):
            text = "suffix needs a prompt of text, without echo and truncate_prompt_tokens"
            raise bad_request("invalid_value", text, "suffix")

    @property
    def max_tokens_field(self) -> str:
        """Name of the field that sets the output limit."""
        return "max_tokens"


class TemplateRequest(_Body):
    """Fields of bodies that are rendered and not run."""

    model: str = ""
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_kwargs)] = {}
    documents: list[dict[str, str]] | None = None


class ApplyTemplateRequest(TemplateRequest):
    """Body of POST /apply-template."""

    messages: Messages


class TokenizeRequest(TemplateRequest):
    """Body of POST /tokenize: ``prompt`` (or ``content``) or ``messages``."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    tokens: TokenIds
    model: str = ""
    skip_special_tokens: bool = False


# --- parsing --------------------------------------------------------------------------------------

B = TypeVar("B", bound=_Body)

# Accepted, without effect, and not worth a word to the client.
_SILENT = frozenset({"store", "metadata"})
# Accepted, without effect, reported, but no mistake of the client's.
_INERT = frozenset(
    {
        "service_tier",
        "verbosity",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
# Read as not given where they are "": Open WebUI sends a setting that is shown but not filled in.
_BLANK = frozenset({"logit_bias", "reasoning_effort"})


def parse(cls: type[B], body: Mapping[str, Any]) -> B:
    """Check a body against a model; raises :class:`APIError` for the first bad field."""
    try:
        return cls.model_validate(
            {k: v for k, v in body.items() if v is not None and not (v == "" and k in _BLANK)}
        )
    except ValidationError as error:
        raise from_validation_error(error) from None


def ignored_fields(request: _Body, *, strict: bool) -> list[str]:
    """Return the names that had no effect.

    Raises :class:`APIError` for the first name that the endpoint does not know if ``strict``.
    """
    names = [name for name in request.model_extra or {} if name not in _SILENT | request.checked]
    for name in names:
        if strict and name not in _INERT:
            raise bad_request("unknown_parameter", f"unknown field {quote(name)}", name[:64])
    return names


# --- refusing -------------------------------------------------------------------------------------


def refuse_unsupported(
    request: ChatCompletionRequest | CompletionRequest, *, priorities: bool, templates: bool
) -> None:
    """Raise :class:`APIError` for the first field that asks for something that is not built.

    ``priorities`` says whether the scheduler honours them, ``templates`` whether those of requests
    are trusted.
    """
    for name, value in (request.model_extra or {}).items():
        if name in request.checked and not _is_one_of(value, request.neutral[name]):
            raise _refusal(name, value)
    if request.priority and not priorities:
        raise bad_request(
            "unsupported_parameter",
            "priority needs the server flag --scheduling-policy priority",
            "priority",
        )
    if isinstance(request, ChatCompletionRequest):
        refuse_template(request, trusted=templates)


def refuse_template(request: ChatCompletionRequest | TemplateRequest, *, trusted: bool) -> None:
    """Raise the :class:`APIError` of a request that brings a chat template, unless ``trusted``."""
    if request.chat_template is not None and not trusted:
        raise bad_request(
            "unsupported_parameter",
            "chat_template needs the server flag --trust-request-template",
            "chat_template",
        )


def _is_one_of(value: Any, neutral: Iterable[Any]) -> bool:
    return any(type(value) is type(n) and value == n for n in neutral)


def _refusal(name: str, value: Any) -> APIError:
    if name == "modalities":
        return bad_request("unsupported_value", 'only the modality "text" is supported', name)
    return bad_request("unsupported_parameter", f"{name} is not supported", name)
