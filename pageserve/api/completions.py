"""POST /v1/completions."""

import time

from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.choices import Prompt
from pageserve.api.context import ServingContext
from pageserve.api.errors import bad_request
from pageserve.api.protocol import CompletionRequest
from pageserve.api.serving import (
    check_text_length,
    check_token_ids,
    compile_constraint,
    fit_prompt,
    read_generation,
    respond,
    sampling_params,
)
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def create_completion(context: ServingContext, http: Request) -> Response:
    """Answer one request; raises :class:`APIError` before anything is sent."""
    arrival = time.monotonic()
    request, headers = await read_generation(context, http, CompletionRequest)

    def prepare() -> tuple[list[Prompt], SamplingParams]:
        params = _params(context, request)
        return [_encode(context, request, prompt) for prompt in request.prompt], params

    # Checking ids takes less time than a thread's turn.
    plain = not (request.echo or request.stop or request.bad_words)
    if plain and all(isinstance(prompt, list) for prompt in request.prompt):
        prompts, params = prepare()
    else:
        prompts, params = await context.in_thread(prepare)
    grammar = await compile_constraint(context, request)
    return respond(context, http, request, prompts, params, grammar, headers, arrival)


def _encode(context: ServingContext, request: CompletionRequest, prompt: str | list[int]) -> Prompt:
    tokenizer = context.loaded_tokenizer
    text = None
    if isinstance(prompt, str):
        if request.suffix:
            prompt = _fill_in_middle(tokenizer, prompt, request.suffix)
        if request.truncate_prompt_tokens is None:
            check_text_length(context, request, prompt, "prompt")
            text = prompt
        prompt = tokenizer.encode(prompt, request.add_special_tokens)
    else:
        check_token_ids(context, prompt, "prompt")
    token_ids = fit_prompt(context, request, prompt, "prompt")
    return Prompt.of(tokenizer, token_ids, text) if request.echo else Prompt(token_ids)


def _fill_in_middle(tokenizer: Tokenizer, prompt: str, suffix: str) -> str:
    if tokenizer.fim_tokens is None:
        raise bad_request("unsupported_parameter", "this model does not take a suffix", "suffix")
    before_prefix, before_suffix, before_middle = tokenizer.fim_tokens
    return f"{before_prefix}{prompt}{before_suffix}{suffix}{before_middle}"


def _params(context: ServingContext, request: CompletionRequest) -> SamplingParams:
    given = request.max_tokens
    max_tokens = min(DEFAULT_MAX_TOKENS, context.max_model_len) if given is None else given
    logprobs, scores = request.logprobs, request.prompt_logprobs
    if logprobs is not None and request.echo:
        scores = max(logprobs, scores or 0)
    if (request.best_of or request.n) > request.n and logprobs is None:
        logprobs = 0  # to rank by
    return sampling_params(context, request, max_tokens, logprobs, scores)
