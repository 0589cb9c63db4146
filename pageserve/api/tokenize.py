"""POST /tokenize and /detokenize, in the shapes of vLLM, llama.cpp and SGLang."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.body import read_json
from pageserve.api.chat_completions import render
from pageserve.api.context import ServingContext
from pageserve.api.errors import bad_request
from pageserve.api.protocol import (
    DetokenizeRequest,
    TokenizeRequest,
    ignored_fields,
    parse,
    refuse_template,
)
from pageserve.api.responses import JSONResponse
from pageserve.api.serving import check_token_ids, report_ignored


async def tokenize(context: ServingContext, http: Request) -> Response:
    """Return the token ids of a text or of a conversation; raises :class:`APIError`."""
    request = parse(TokenizeRequest, await read_json(http, context.max_body_bytes))
    headers = _check(context, request)
    texts = [text for text in (request.prompt, request.content) if text is not None]
    if len(texts) + (request.messages is not None) != 1:
        raise bad_request("invalid_value", "give either prompt or messages", "prompt")
    return await context.in_thread(
        lambda: JSONResponse(_spell(context, request, texts), headers=headers),
        apart=True,
    )


async def detokenize(context: ServingContext, http: Request) -> Response:
    """Return the text of token ids under three names; raises :class:`APIError`."""
    request = parse(DetokenizeRequest, await read_json(http, context.max_body_bytes))
    headers = _check(context, request)
    text = await context.in_thread(lambda: _decode(context, request))
    return JSONResponse({"prompt": text, "content": text, "text": text}, headers=headers)


def _check(context: ServingContext, request: TokenizeRequest | DetokenizeRequest) -> dict[str, str]:
    context.resolve_model(request.model)
    if isinstance(request, TokenizeRequest):
        refuse_template(request, trusted=context.config.trust_request_template)
    names = ignored_fields(request, strict=context.config.strict_params)
    return report_ignored(context, names)


def _spell(
    context: ServingContext, request: TokenizeRequest, texts: Sequence[str]
) -> dict[str, Any]:
    """Return the answer to a request; a long text has millions of tokens, each spelled once."""
    tokenizer = context.loaded_tokenizer
    token_ids = _encode(context, request, texts)
    tokens: Sequence[Any] = token_ids
    strings = None
    if request.with_pieces:
        pieces = {i: _piece(tokenizer.token_bytes(i) or b"") for i in set(token_ids)}
        tokens = [{"id": i, "piece": pieces[i]} for i in token_ids]
    if request.return_token_strs:
        texts_by_id = {i: tokenizer.token_text(i) for i in set(token_ids)}
        strings = [texts_by_id[i] for i in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": context.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def _encode(context: ServingContext, request: TokenizeRequest, texts: Sequence[str]) -> list[int]:
    special = request.add_special_tokens
    if special is None:
        special = request.add_special
    if request.messages is not None:
        text = render(context, request).text
        return context.loaded_tokenizer.encode_marked(text, bool(special))
    return context.loaded_tokenizer.encode(texts[0], special is not False)


def _decode(context: ServingContext, request: DetokenizeRequest) -> str:
    check_token_ids(context, request.tokens, "tokens")
    return context.loaded_tokenizer.decode(request.tokens, request.skip_special_tokens)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
