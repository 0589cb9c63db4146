"""POST /tokenize and /detokenize, in the shapes of vLLM, llama.cpp and SGLang."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.body import read_json
from pageserve.api.chat_completions import render
from pageserve.api.context import ServingContext
from pageserve.api.errors import bad_request
from pageserve.api.protocol import DetokenizeRequest, TokenizeRequest, ignored_fields, parse
from pageserve.api.responses import JSONResponse
from pageserve.api.serving import report_ignored, vocab_size


async def tokenize(context: ServingContext, http: Request) -> Response:
    """Return the token ids of a text or of a conversation; raises :class:`APIError`."""
    request = parse(TokenizeRequest, await read_json(http, context.max_body_bytes))
    headers = _check(context, request)
    texts = [text for text in (request.prompt, request.content) if text is not None]
    if len(texts) + (request.messages is not None) != 1:
        raise bad_request("invalid_value", "give either prompt or messages", "prompt")
    token_ids = await context.in_thread(lambda: _encode(context, request, texts))
    tokenizer = context.loaded_tokenizer
    strings = [tokenizer.token_text(i) for i in token_ids] if request.return_token_strs else None
    tokens: Sequence[Any] = token_ids
    if request.with_pieces:
        tokens = [{"id": i, "piece": _piece(tokenizer.token_bytes(i) or b"")} for i in token_ids]
    body = {
        "count": len(token_ids),
        "max_model_len": context.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }
    return JSONResponse(body, headers=headers)


async def detokenize(context: ServingContext, http: Request) -> Response:
    """Return the text of token ids under three names; raises :class:`APIError`."""
    request = parse(DetokenizeRequest, await read_json(http, context.max_body_bytes))
    headers = _check(context, request)
    size = vocab_size(context)
    for i in request.tokens:
        if not 0 <= i < size:
            message = f"tokens has id {i}; ids run from 0 to {size - 1}"
            raise bad_request("invalid_value", message, "tokens")
    tokenizer = context.loaded_tokenizer
    text = await context.in_thread(
        lambda: tokenizer.decode(request.tokens, request.skip_special_tokens)
    )
    body = {"prompt": text, "content": text, "text": text}
    return JSONResponse(body, headers=headers)


def _check(context: ServingContext, request: TokenizeRequest | DetokenizeRequest) -> dict[str, str]:
    context.resolve_model(request.model)
    names = ignored_fields(request, strict=context.config.strict_params)
    return report_ignored(context, names)


def _encode(context: ServingContext, request: TokenizeRequest, texts: Sequence[str]) -> list[int]:
    special = request.add_special_tokens
    if special is None:
        special = request.add_special
    if request.messages is not None:
        return context.loaded_tokenizer.encode_marked(render(context, request), bool(special))
    return context.loaded_tokenizer.encode(texts[0], special is not False)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
