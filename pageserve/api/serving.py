"""From a checked request to running sequences: what both generating endpoints share."""

import logging
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pageserve.api import logs
from pageserve.api.body import read_json
from pageserve.api.chat_plan import ChatPlan
from pageserve.api.choices import Fanout, Prompt
from pageserve.api.context import ServingContext
from pageserve.api.errors import APIError, bad_request
from pageserve.api.generation import Generation
from pageserve.api.ids import random_id
from pageserve.api.keys import ApiKey
from pageserve.api.logprobs import ChatLogprobs, CompletionLogprobs, LogprobFormat
from pageserve.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ignored_fields,
    parse,
    refuse_unsupported,
)
from pageserve.api.replies import CHAT, COMPLETION, EventStreamResponse, Reply, WholeResponse
from pageserve.api.structured_output import constraint_of, deprecation
from pageserve.engine.output_processor import stop_matcher
from pageserve.messages import AddRequest
from pageserve.sampling_params import ParameterError, SamplingParams, check_ids, for_choice
from pageserve.tokenizer import Tokenizer

logger = logging.getLogger("pageserve.api")

MAX_TOP_K = 2**31 - 1  # beyond any vocabulary, so as good as none
MAX_IGNORED_NAMES = 20
WARNING = "x-pageserve-warning"
MAX_WARNING = 1000  # characters
MAX_WARNED_NAMES = 1000

GenerationBody = TypeVar("GenerationBody", ChatCompletionRequest, CompletionRequest)


async def read_generation(
    context: ServingContext, http: Request, cls: type[GenerationBody]
) -> tuple[GenerationBody, dict[str, str]]:
    """Return the checked body and the headers that its reply gets; raises :class:`APIError`."""
    body = await read_json(http, context.max_body_bytes)
    request = parse(cls, body)
    request.model = context.resolve_model(request.model)
    if len(request.stop) > context.config.max_stop:
        message = f"stop takes at most {context.config.max_stop} strings"
        raise bad_request("array_above_max_length", message, "stop")
    if request.request_id:
        logs.request_id.set(request.request_id)
    request.check_conflicts()
    refuse_unsupported(
        request, priorities=context.priorities, templates=context.config.trust_request_template
    )
    headers = report_ignored(context, ignored_fields(request, strict=context.config.strict_params))
    warning = deprecation(request)
    return request, add_warnings(headers, () if warning is None else (warning,))


def add_warnings(headers: dict[str, str], warnings: Sequence[str]) -> dict[str, str]:
    """Return the headers of a reply with things that its client should know."""
    if not warnings:
        return headers
    earlier = headers.get(WARNING)
    text = "; ".join([*([] if earlier is None else [earlier]), *warnings])
    printable = "".join(c if " " <= c <= "~" else "?" for c in text)
    return headers | {WARNING: printable[:MAX_WARNING]}


async def compile_constraint(
    context: ServingContext, request: ChatCompletionRequest | CompletionRequest
) -> str | None:
    """Return the grammar of the output, None if it is free; raises :class:`APIError`."""
    constraint = constraint_of(request)
    if constraint is None:
        return None
    return await context.grammars.compile(constraint, context.loaded_tokenizer)


def report_ignored(context: ServingContext, names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists fields without effect, and warn once of each."""
    if not names:
        return {}
    safe = [_header_safe(name) for name in names[:MAX_IGNORED_NAMES]]
    for name in safe:
        if name not in context.warned_names and len(context.warned_names) < MAX_WARNED_NAMES:
            context.warned_names.add(name)
            logger.warning("the request field %s has no effect here", name)
    return {"x-pageserve-ignored": ",".join(safe)}


def _header_safe(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name[:64])


# --- prompts --------------------------------------------------------------------------------------


def _max_prompt_len(
    context: ServingContext, request: ChatCompletionRequest | CompletionRequest
) -> int:
    """The most tokens a prompt may have: room for one more, unless none is wanted."""
    if request.max_tokens == 0:
        ready = context.ready
        return min(ready.max_model_len, ready.num_kv_blocks * ready.block_size)
    return context.max_model_len - 1


def check_text_length(
    context: ServingContext,
    request: ChatCompletionRequest | CompletionRequest,
    text: str,
    param: str,
) -> None:
    """Refuse text that cannot fit whatever its tokens are, without tokenising it."""
    at_least = context.loaded_tokenizer.min_num_tokens(text)
    if at_least > _max_prompt_len(context, request):
        wanted = int(request.max_tokens != 0)
        raise context_length_exceeded(context, at_least, param, "at least ", wanted)


def fit_prompt(
    context: ServingContext,
    request: ChatCompletionRequest | CompletionRequest,
    token_ids: list[int],
    param: str,
) -> list[int]:
    """Return the prompt, truncated if asked for; raises the :class:`APIError` of one too long."""
    keep = request.truncate_prompt_tokens
    if keep is not None:
        keep = context.max_model_len - 1 if keep == -1 else keep
        start = max(0, len(token_ids) - keep)
        token_ids = token_ids[start:] if request.truncation_side == "left" else token_ids[:keep]
    if not token_ids:
        # An empty prompt is the client's doing, or that of a truncation to nothing.
        blame = "truncate_prompt_tokens" if keep == 0 else param
        raise bad_request("invalid_value", "the prompt has no tokens", blame)
    if len(token_ids) > _max_prompt_len(context, request):
        wanted = int(request.max_tokens != 0)
        raise context_length_exceeded(context, len(token_ids), param, wanted=wanted)
    return token_ids


def context_length_exceeded(
    context: ServingContext, num_prompt: int, param: str, bound: str = "", wanted: int = 1
) -> APIError:
    """Return the 400 of a prompt that leaves no room for the ``wanted`` output tokens.

    Clients tell this error by its words, so that they can shorten a conversation: LiteLLM by the
    first sentence, LangChain by "prompt is too long".
    """
    limit = context.max_model_len
    needed = "at least one is" if wanted == 1 else f"{wanted} are"
    return bad_request(
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens. However, the prompt is too long: "
        f"it has {bound}{num_prompt} tokens and {needed} needed for the output.",
        param,
        {"prompt_tokens": num_prompt, "max_model_len": limit},
    )


def vocab_size(context: ServingContext) -> int:
    """Return the number of token ids that requests may name."""
    return min(context.loaded_tokenizer.size, context.ready.vocab_size)


def check_token_ids(context: ServingContext, token_ids: Sequence[int], param: str) -> None:
    """Raise the :class:`APIError` of the first id that the model does not have."""
    try:
        check_ids(param, token_ids, vocab_size(context))
    except ParameterError as error:
        raise bad_request(error.code, str(error), error.param) from None


# --- sampling -------------------------------------------------------------------------------------


def sampling_params(
    context: ServingContext,
    request: ChatCompletionRequest | CompletionRequest,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the parameters in force: the request's, then the model's defaults, then OpenAI's.

    Raises :class:`APIError`.
    """
    if max_tokens is not None and max_tokens > context.max_model_len:
        raise bad_request(
            "integer_above_max_value",
            f"{request.max_tokens_field} must be at most {context.max_model_len}, got {max_tokens}",
            request.max_tokens_field,
        )
    chosen = {
        name: getattr(request, name)
        if getattr(request, name) is not None
        else getattr(context.defaults, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }
    if chosen["top_k"] is not None:  # any integer is welcome, but the engine's are 32 bits wide
        chosen["top_k"] = min(chosen["top_k"], MAX_TOP_K)
    params = SamplingParams(
        **{name: value for name, value in chosen.items() if value is not None},
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        bad_words_token_ids=_bad_words(context.loaded_tokenizer, request.bad_words),
        seed=None if request.seed == -1 else request.seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    try:
        params.validate(vocab_size(context))
    except ParameterError as error:
        raise bad_request(error.code, str(error), error.param) from None
    if params.stop:  # a long list takes a while to build, which the event loop must not pay
        stop_matcher(context.loaded_tokenizer, tuple(params.stop), params.skip_special_tokens)
    return params


def _bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]] | None:
    """Return the token sequences that spell the words, at the start of a word and inside one."""
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip(" "))]
    sequences = [tokenizer.encode(s, add_special_tokens=False) for s in dict.fromkeys(spellings)]
    return sequences or None


def _for_prompt(
    context: ServingContext, params: SamplingParams, num_prompt: int, param: str
) -> SamplingParams:
    """Return the parameters with an output limit that fits the context behind this prompt.

    Raises :class:`APIError` if it does not fit and --strict-context is set.
    """
    room = context.max_model_len - num_prompt
    if context.config.strict_context and params.max_tokens is not None and params.max_tokens > room:
        raise context_length_exceeded(context, num_prompt, param, wanted=params.max_tokens)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    return msgspec.structs.replace(
        params, max_tokens=limit, min_tokens=min(params.min_tokens, limit)
    )


# --- running --------------------------------------------------------------------------------------


def respond(
    context: ServingContext,
    http: Request,
    request: ChatCompletionRequest | CompletionRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    grammar: str | None,
    headers: dict[str, str],
    arrival: float,
    plan: ChatPlan | None = None,
) -> Response:
    """Enqueue the sequences of the prompts and return the response that runs them.

    ``plan`` says how to take the outputs apart and where ``grammar`` is in force.
    Raises :class:`APIError` if the server has no place for them.
    """
    is_chat = isinstance(request, ChatCompletionRequest)
    reply_id = random_id("chatcmpl-" if is_chat else "cmpl-")
    fanout = _fanout(request, len(prompts), params.greedy)
    reply = Reply(
        shape=CHAT if is_chat else COMPLETION,
        id=reply_id,
        created=int(time.time()),
        model=request.model,
        fingerprint=context.ready.fingerprint,
        fanout=fanout,
        prompts=prompts,
        tokenizer=context.loaded_tokenizer,
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
        logprobs=_logprob_formats(context, request, fanout),
        num_logprobs=params.logprobs or 0,
        echo=isinstance(request, CompletionRequest) and request.echo,
        num_prompt_logprobs=request.prompt_logprobs,
        return_token_ids=request.return_token_ids,
        return_prompt_text=isinstance(request, ChatCompletionRequest)
        and request.return_prompt_text,
        timings=context.config.timings or http.headers.get("x-timings") == "1",
        return_progress=request.return_progress,
        reasoning_field=context.config.reasoning_field,
    )
    key: ApiKey = http.scope["api_key"]
    requests: list[AddRequest] = []
    for prompt in prompts:
        own = _for_prompt(
            context, params, len(prompt.token_ids), "messages" if is_chat else "prompt"
        )
        parent_id = None
        for i in range(fanout.sequences_per_prompt):
            request_id = f"{reply_id}-{len(requests)}"
            requests.append(
                AddRequest(
                    request_id=request_id,
                    prompt_token_ids=prompt.token_ids,
                    sampling_params=for_choice(own, i),
                    arrival_time=arrival,
                    priority=max(-(2**63), min(2**63 - 1, request.priority + key.priority)),
                    cache_salt=request.cache_salt,
                    parent_id=parent_id,
                    tenant=key.name if not context.keys.is_open else request.user or "",
                    weight=key.weight,
                    grammar=grammar,
                    grammar_trigger_ids=list(plan.trigger_ids) if plan is not None else [],
                )
            )
            parent_id = parent_id or request_id
    limit_ms = _deadline_ms(context, http, request)
    deadline = None if limit_ms is None else arrival + limit_ms / 1000
    parsers = [plan.parser() for _ in requests] if plan is not None else None
    generation = Generation(
        context, requests, http.scope["request_id"], deadline, key, parsers, fanout.n
    )
    response = EventStreamResponse if request.stream else WholeResponse
    return response(context, generation, reply, headers)


def _fanout(
    request: ChatCompletionRequest | CompletionRequest, num_prompts: int, greedy: bool
) -> Fanout:
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return Fanout(num_prompts, request.n, best_of or request.n, greedy)


def _logprob_formats(
    context: ServingContext, request: ChatCompletionRequest | CompletionRequest, fanout: Fanout
) -> list[LogprobFormat] | None:
    """Return a format for each choice, None if no log probabilities are to be shown."""
    as_ids = request.return_tokens_as_token_ids
    if isinstance(request, ChatCompletionRequest):
        return [ChatLogprobs(as_ids)] * fanout.num_choices if request.logprobs else None
    if request.logprobs is None:
        return None
    strips_space = request.echo and context.loaded_tokenizer.strips_leading_space
    return [CompletionLogprobs(as_ids, strips_space) for _ in range(fanout.num_choices)]


def _deadline_ms(
    context: ServingContext, http: Request, request: ChatCompletionRequest | CompletionRequest
) -> float | None:
    header = http.headers.get("x-request-timeout-ms")
    if request.deadline_ms is not None:
        return request.deadline_ms
    if header is None:
        seconds = context.config.default_deadline
        return None if seconds is None else seconds * 1000
    digits = header.isascii() and header.isdigit() and len(header) <= 8
    if not digits or not 1 <= int(header) <= 86_400_000:
        raise bad_request("invalid_value", "x-request-timeout-ms must be 1 to 86400000")
    return int(header)
