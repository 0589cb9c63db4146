"""Routes for operators and tools: what the server is, how loaded it is, and its prefix cache."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import pageserve
from pageserve.api.body import read_json
from pageserve.api.chat_completions import render
from pageserve.api.context import ServingContext
from pageserve.api.keys import require_admin
from pageserve.api.protocol import ApplyTemplateRequest, ignored_fields, parse, refuse_template
from pageserve.api.responses import JSONResponse
from pageserve.api.serving import report_ignored
from pageserve.tokenizer import PLAIN_MARK


async def server_info(context: ServingContext, http: Request) -> Response:
    """Say how the server is set up; never shows a secret. Raises :class:`APIError` (403)."""
    require_admin(http)
    ready = context.ready
    server = dataclasses.asdict(context.config)
    server["api_key"] = len(context.config.api_key)
    facts = msgspec.structs.asdict(ready)
    config = facts.pop("config") or context.engine_config
    return JSONResponse(
        {
            "version": pageserve.__version__,
            "models": list(context.model_names),
            "config": _without_folders({**dataclasses.asdict(config), "server": server}),
            "defaults": dataclasses.asdict(context.defaults),
            "engine": facts,
            "memory": {
                **ready.memory_bytes,
                "num_kv_blocks": ready.num_kv_blocks,
                "block_size": ready.block_size,
                "kv_tokens": ready.num_kv_blocks * ready.block_size,
                "max_model_len": context.max_model_len,
            },
            "keys": [
                {
                    "name": key.name,
                    "admin": key.admin,
                    "requests_per_minute": key.requests and key.requests.per_minute,
                    "tokens_per_minute": key.tokens and key.tokens.per_minute,
                    "max_concurrent": key.max_concurrent,
                    "priority": key.priority,
                    "weight": key.weight,
                }
                for key in context.keys.keys
            ],
        }
    )


def _without_folders(value: Any) -> Any:
    """Cut paths to their last part: how the host's folders are named is nobody's business."""
    if isinstance(value, dict):
        return {name: _without_folders(entry) for name, entry in value.items()}
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


async def load(context: ServingContext, http: Request) -> Response:
    """Say how busy the engine is."""
    stats = context.client.stats
    blocks = stats.num_used_blocks + stats.num_free_blocks
    return JSONResponse(
        {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "waiting_tokens": context.load.pending_tokens,
            "kv_usage": stats.num_used_blocks / blocks if blocks else 0.0,
            "server_load": len(context.generations),
        }
    )


async def tokenizer_info(context: ServingContext, http: Request) -> Response:
    """Return what clients that render prompts themselves need of tokenizer_config.json."""
    tokenizer = context.loaded_tokenizer
    return JSONResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context.max_model_len,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            **tokenizer.special_tokens_map,
            "chat_template": tokenizer.chat_template,
        }
    )


async def apply_template(context: ServingContext, http: Request) -> Response:
    """Return the prompt text of a conversation; raises :class:`APIError`."""
    request = parse(ApplyTemplateRequest, await read_json(http, context.max_body_bytes))
    context.resolve_model(request.model)
    refuse_template(request, trusted=context.config.trust_request_template)
    names = ignored_fields(request, strict=context.config.strict_params)
    headers = report_ignored(context, names)
    rendered = await context.in_thread(
        lambda: render(context, request), apart=request.chat_template is not None
    )
    return JSONResponse({"prompt": rendered.text.replace(PLAIN_MARK, "")}, headers=headers)


async def reset_prefix_cache(context: ServingContext, http: Request) -> Response:
    """Forget all cached prefixes; raises :class:`APIError` (403, or 503 if nobody answers)."""
    require_admin(http)
    num_blocks = await context.ask(context.client.reset_prefix_cache())
    return JSONResponse({"num_blocks": num_blocks})
