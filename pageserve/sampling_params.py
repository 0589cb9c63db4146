"""How one request wants its tokens chosen and where it wants to stop.

The API fills it from the JSON body, it crosses the process as it is, and the scheduler (stopping)
and the sampler (choosing) read it. Nothing here knows about a tokenizer or a tensor.
"""

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 1024  # of the engine; the API allows --max-stop
GREEDY_EPS = 1e-5


class ParameterError(ValueError):
    """A sampling parameter is out of range; ``param`` is its name and ``code`` the API's word."""

    def __init__(self, param: str, code: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, named as in vLLM. ``temperature`` below 1e-5 means greedy.

    ``max_tokens`` None means as many as fit the context, 0 none: the prompt is only computed (and
    its tokens scored, with ``prompt_logprobs``). ``logprobs`` None asks for none, 0 for the
    chosen token's only, k for the k best as well; ``prompt_logprobs`` means the same for the tokens
    of the prompt. ``seed`` None lets the engine draw one.
    ``stop`` strings are matched by the front-end on text; the engine stops on ids only.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the highest logit wins without a draw."""
        return self.temperature < GREEDY_EPS

    @property
    def edits_logits(self) -> bool:
        """Whether anything but the filters (top-k, top-p, min-p) may change what is likely."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words_token_ids
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    def validate(self, vocab_size: int | None = None) -> None:
        """Check every range; raise :class:`ParameterError` that names the first bad field.

        ``vocab_size`` is the number of ids the tokenizer defines; ids at or above it are refused.
        """
        _decimal("temperature", self.temperature, 0, 2)
        _decimal("top_p", self.top_p, 0, 1)
        _decimal("min_p", self.min_p, 0, 1)
        _decimal("frequency_penalty", self.frequency_penalty, -2, 2)
        _decimal("presence_penalty", self.presence_penalty, -2, 2)
        _decimal("repetition_penalty", self.repetition_penalty, 0.01, 10)
        _integer("top_k", self.top_k, -1)
        _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        check_ids("logit_bias", self.logit_bias or (), vocab_size)
        for bias in (self.logit_bias or {}).values():
            _decimal("logit_bias", bias, -100, 100)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParameterError(
                "allowed_token_ids", "empty_array", "allowed_token_ids must not be empty"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            check_ids(name, getattr(self, name) or (), vocab_size)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError(
                "stop", "array_above_max_length", f"stop takes at most {MAX_STOP_STRINGS} strings"
            )
        if any(not s for s in self.stop):
            raise ParameterError(
                "stop", "string_below_min_length", "a stop string must not be empty"
            )


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request gets that leaves a field out: the values of the model's generation_config.json
    and of --override-generation-config. None, where both are silent, leaves OpenAI's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def as_dict(self) -> dict[str, float | int]:
        """Return the fields that have a value."""
        return {key: value for key, value in vars(self).items() if value is not None}

    def over(self, others: Self) -> Self:
        """Return these values, and the others' where these are silent."""
        return type(self)(**(vars(others) | self.as_dict()))


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of choice ``index`` of several to one prompt: it draws from a seed of
    its own, and the prompt is scored once, with choice 0."""
    if index == 0:
        return params
    seed = None if params.seed is None else (params.seed + index) % 2**64
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)


def _decimal(name: str, value: float, low: float, high: float) -> None:
    if math.isnan(value) or value > high:
        raise ParameterError(
            name, "decimal_above_max_value", f"{name} must be at most {high}, got {value}"
        )
    if value < low:
        raise ParameterError(
            name, "decimal_below_min_value", f"{name} must be at least {low}, got {value}"
        )


def _integer(name: str, value: int | None, low: int, high: int | None = None) -> None:
    if value is None:
        return
    if value < low:
        raise ParameterError(
            name, "integer_below_min_value", f"{name} must be at least {low}, got {value}"
        )
    if high is not None and value > high:
        raise ParameterError(
            name, "integer_above_max_value", f"{name} must be at most {high}, got {value}"
        )


def check_ids(name: str, token_ids: Collection[int], vocab_size: int | None) -> None:
    """Raise :class:`ParameterError` for the first id that a vocabulary of this size (None: of any)
    does not have. ``name`` is the parameter that has the ids."""
    try:  # in C: there may be a hundred thousand
        msgspec.convert(list(token_ids), _ids_below(vocab_size))
    except msgspec.ValidationError:
        end = math.inf if vocab_size is None else vocab_size
        wrong = next((i for i in token_ids if not 0 <= i < end), None)
        if wrong is None:
            return  # integers of another kind
        message = f"{name} has token id {wrong}; ids run from 0"
        raise ParameterError(
            name, "invalid_value", message if vocab_size is None else f"{message} to {end - 1}"
        ) from None


@functools.cache
def _ids_below(vocab_size: int | None) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
