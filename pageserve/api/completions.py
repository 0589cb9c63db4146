"""POST /v1/completions."""

import time

from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.context import ServingContext
from pageserve.api.errors import bad_request
from pageserve.api.protocol import CompletionRequest
from pageserve.api.serving import (
    check_text_length,
    compile_constraint,
    fit_prompt,
    read_generation,
    respond,
    sampling_params,
    vocab_size,
)
from pageserve.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16


async def create_completion(context: ServingContext, http: Request) -> Response:
    """Answer one request; raises :class:`APIError` before anything is sent."""
    arrival = time.monotonic()
    request, headers = await read_generation(context, http, CompletionRequest)

    def prepare() -> tuple[list[list[int]], SamplingParams]:
        params = _params(context, request)
        return [_encode(context, request, prompt) for prompt in request.prompt], params

    prompts, params = await context.in_thread(prepare)
    grammar = await compile_constraint(context, request)
    return respond(context, http, request, prompts, params, grammar, headers, arrival)


def _encode(
    context: ServingContext, request: CompletionRequest, prompt: str | list[int]
) -> list[int]:
    if isinstance(prompt, str):
        if request.truncate_prompt_tokens is None:
            check_text_length(context, prompt, "prompt")
        prompt = context.loaded_tokenizer.encode(prompt, request.add_special_tokens)
    else:
        size = vocab_size(context)
        if min(prompt) < 0 or max(prompt) >= size:
            wrong = next(i for i in prompt if not 0 <= i < size)
            raise bad_request(
                "invalid_value",
                f"prompt has token id {wrong}; ids run from 0 to {size - 1}",
                "prompt",
            )
    return fit_prompt(context, request, prompt, "prompt")


def _params(context: ServingContext, request: CompletionRequest) -> SamplingParams:
    given = request.max_tokens
    max_tokens = min(DEFAULT_MAX_TOKENS, context.max_model_len) if given is None else given
    return sampling_params(context, request, max_tokens, request.logprobs)
