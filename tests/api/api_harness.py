"""An app over a scripted engine, called in process, and readers of its answers."""

import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes import ScriptedEngine, byte_tokenizer

from pageserve.api.app import build_app
from pageserve.api.context import SamplingDefaults, ServingContext
from pageserve.config import EngineConfig, SchedulerArgs, ServerArgs

T = TypeVar("T")
TOKENIZER = byte_tokenizer()
CHAT = "/v1/chat/completions"
CMPL = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


class Api:
    """One app and the loop it lives in; requests never leave the process."""

    def __init__(
        self,
        runner: asyncio.Runner,
        *,
        names: tuple[str, ...] = ("tiny", "org/tiny"),
        server: dict[str, Any] | None = None,
        defaults: SamplingDefaults | None = None,
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
    """The error object of a response, checked for its shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert set(error) <= {"message", "type", "param", "code", "prompt_tokens", "max_model_len"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) <= 1000
    assert "Traceback" not in error["message"] and ".py" not in error["message"]
    assert len(response.content) < 2048
    return error


def events_of(text: str) -> list[Any]:
    """The data of a stream: parsed JSON, and the string [DONE]."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    data = [f.removeprefix("data: ") for f in frames if not f.startswith(":")]
    assert len(data) == sum(f.startswith("data: ") for f in frames)
    return [x if x == "[DONE]" else json.loads(x) for x in data]
