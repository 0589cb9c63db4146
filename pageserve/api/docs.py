"""What the API says of itself: /openapi.json, a page that shows it, and the playground.

The routes read their bodies themselves, so FastAPI knows nothing of them; the document is put
together from the models that check the bodies. Both pages are whole: they load nothing from
elsewhere.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.context import ServingContext

PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}
# Whatever the route: the statuses of section 2 of the contract that a request can meet.
ERROR_STATUSES = (400, 401, 403, 404, 405, 413, 415, 429, 499, 500, 503, 504)
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "maxLength": 1000},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
        "status": {"type": "string"},  # these two of /ready only
        "progress": {"type": "object"},
    },
}


async def playground(context: ServingContext, http: Request) -> Response:
    """Return the page to chat on."""
    return _page("index.html")


async def docs(context: ServingContext, http: Request) -> Response:
    """Return the page that shows /openapi.json."""
    return _page("docs.html")


def _page(name: str) -> Response:
    return Response(_read(name), headers=PAGE_HEADERS, media_type="text/html; charset=utf-8")


@cache
def _read(name: str) -> bytes:
    return files("pageserve.api").joinpath("static", name).read_bytes()


def describe(
    path: str, body: type[BaseModel] | None, answer: type[BaseModel] | str
) -> dict[str, Any]:
    """Return what FastAPI is to say of a route: parameters, body, answer and errors.

    ``answer`` is the model of the JSON answer, or the type of its content.
    """
    error = {"$ref": "#/components/schemas/Error"}
    responses: dict[str, Any] = {
        str(status): {"description": "error", "content": {"application/json": {"schema": error}}}
        for status in ERROR_STATUSES
    }
    content = {answer: {}} if isinstance(answer, str) else {"application/json": _reference(answer)}
    responses["200"] = {"description": "success", "content": content}
    names = re.findall(r"{(\w+)", path)
    extra: dict[str, Any] = {
        "responses": responses,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
    }
    if body is None:
        return extra
    if "stream" in body.model_fields:
        responses["200"]["content"]["text/event-stream"] = {}
    request = {"content": {"application/json": _reference(body)}, "required": True}
    return {**extra, "requestBody": request}


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


def build_openapi(app: FastAPI, models: set[type[BaseModel]]) -> dict[str, Any]:
    """Return the document: FastAPI's routes, with the schemas of ``models`` filled in."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda m: m.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    components = document.setdefault("components", {})
    components["schemas"] = {**schemas["$defs"], "Error": ERROR_SCHEMA}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    return document
