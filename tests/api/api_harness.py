"""An app over a scripted engine, called in process, and readers of its answers."""

import asyncio
import json
import re
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes import ScriptedEngine, byte_tokenizer

from pageserve.api.app import build_app
from pageserve.api.context import ServingContext
from pageserve.config import EngineConfig, SchedulerArgs, ServerArgs
from pageserve.sampling_params import GenerationDefaults

T = TypeVar("T")
TOKENIZER = byte_tokenizer()
CHAT = "/v1/chat/completions"
CMPL = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
# Every code there is: its HTTP status and type.
ERRORS = {
    **dict.fromkeys(
        (
            "invalid_json", "missing_required_parameter", "invalid_type", "invalid_value",
            "integer_below_min_value", "integer_above_max_value", "decimal_below_min_value",
            "decimal_above_max_value", "string_above_max_length", "string_below_min_length",
            "array_above_max_length", "empty_array", "unsupported_parameter", "unsupported_value",
            "unknown_parameter", "context_length_exceeded", "invalid_json_schema", "invalid_regex",
            "invalid_grammar", "invalid_messages", "invalid_http",
        ),
        (400, INVALID),
    ),
    "missing_api_key": (401, INVALID),
    "invalid_api_key": (401, INVALID),
    "insufficient_permissions": (403, "permission_error"),
    "model_not_found": (404, INVALID),
    "unknown_url": (404, INVALID),
    "request_not_found": (404, INVALID),
    "method_not_allowed": (405, INVALID),
    "request_too_large": (413, INVALID),
    "unsupported_media_type": (415, INVALID),
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "request_cancelled": (499, "api_error"),
    "internal_error": (500, "server_error"),
    **dict.fromkeys(
        ("server_is_overloaded", "model_loading", "server_draining", "engine_dead"),
        (503, UNAVAILABLE),
    ),
    "deadline_exceeded": (504, "timeout_error"),
}  # fmt: skip
KEYS = ("message", "type", "param", "code")


class Api:
    """One app and the loop it lives in; requests never leave the process."""

    def __init__(
        self,
        runner: asyncio.Runner,
        *,
        names: tuple[str, ...] = ("tiny", "org/tiny"),
        server: dict[str, Any] | None = None,
        defaults: GenerationDefaults | None = None,
        policy: Any = "fcfs",
        tokenizer: Any = TOKENIZER,
        loaded: bool = True,
        **engine: Any,
    ) -> None:
        self.runner = runner
        self.engine = ScriptedEngine(tokenizer, loaded=loaded, **engine)
        self.context = ServingContext(
            client=self.engine,
            config=ServerArgs(**(server or {})),
            model_names=names,
            engine_config=EngineConfig(scheduler=SchedulerArgs(scheduling_policy=policy)),
            tokenizer=tokenizer if loaded else None,
        )
        if defaults is not None:
            self.context.defaults = defaults
        self.app = build_app(self.context)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the app's loop."""

        async def bounded() -> T:
            async with asyncio.timeout(30):
                return await work

        return self.runner.run(bounded())

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.send("GET", path, **options))

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.run(self.send("POST", path, **options))

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post(CHAT, {"messages": HI, **fields})

    def cmpl(self, **fields: Any) -> httpx.Response:
        return self.post(CMPL, {"prompt": "hi", **fields})

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics by their full name with labels."""
        lines = [x for x in self.get("/metrics").text.splitlines() if not x.startswith("#")]
        return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}

    def check_alive(self) -> None:
        """The server still answers as it should and nothing of the last request is left."""
        response = self.chat(max_tokens=4)
        assert response.status_code == 200, response.text
        assert self.engine.num_live == 0
        assert not self.context.generations
        load = self.context.load
        assert (load.live, load.pending, load.pending_tokens) == (0, 0, 0)
        assert self.context.in_flight == 0


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a response, checked for its shape and for what its code implies."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    error: dict[str, Any] = body["error"]
    beside = {"status", "progress"} if response.request.url.path.endswith("/ready") else set()
    assert {"error"} <= set(body) <= {"error"} | beside, body
    check_error(error, response.status_code)
    assert len(response.content) < 2048
    return error


def check_error(error: dict[str, Any], status: int | None = None) -> None:
    """Check one error object, with the ``status`` it came with unless it came in a stream."""
    more = ("prompt_tokens", "max_model_len")
    assert tuple(error) in (KEYS, (*KEYS, *more)), error
    assert (len(error) == 4) or error["code"] == "context_length_exceeded"
    expected_status, kind = ERRORS[error["code"]]
    assert error["type"] == kind
    assert status in (None, expected_status, 431 if expected_status == 413 else None), error
    assert error["param"] is None or isinstance(error["param"], str)
    message = error["message"]
    assert isinstance(message, str) and 0 < len(message) <= 1000
    assert not re.search(r"Traceback|\.py\b| at 0x[0-9a-f]{6}|site-packages", message), message


def events_of(text: str) -> list[Any]:
    """The data of a stream: parsed JSON, and the string [DONE]."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    data = [f.removeprefix("data: ") for f in frames if not f.startswith(":")]
    assert len(data) == sum(f.startswith("data: ") for f in frames)
    return [x if x == "[DONE]" else json.loads(x) for x in data]
