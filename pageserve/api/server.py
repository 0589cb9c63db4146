"""The life of a server process: bind, load, serve, drain, leave.

The port is bound before anything is loaded, so a taken one fails at once; until the engine is
ready the API answers 503 with progress. The first SIGINT or SIGTERM drains, a second one leaves at
once. A dead engine ends every stream with an error frame and the process with exit code 1.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from starlette.types import ASGIApp

from pageserve.api.app import build_app
from pageserve.api.connection import Connection
from pageserve.api.context import ServingContext
from pageserve.api.logs import JsonFormatter
from pageserve.checkpoint import ModelError
from pageserve.config import ConfigError, EngineConfig, ServerArgs
from pageserve.engine.process import ProcessClient
from pageserve.hub import resolve_model
from pageserve.messages import LoadProgress
from pageserve.model_config import load_generation_defaults, parse_generation_defaults
from pageserve.tokenizer import load_tokenizer

logger = logging.getLogger("pageserve")

LOG_EVERY = 5.0  # seconds between two lines about the load
FAREWELL = 0.5  # seconds for error frames to reach their clients after the engine has died


def run_server(client: ProcessClient, args: ServerArgs) -> int:
    """Serve the launched ``client`` until a signal or the engine's death; return the process's exit
    code. Raises :class:`ConfigError`."""
    console = Console(stderr=True)
    if args.log_format == "json":
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
    elif console.is_terminal:
        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:  # a file or a pipe: one line each, nothing wrapped
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler])
    for name in ("uvicorn", "uvicorn.error"):  # its life is ours, and told by us
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        console.print(
            f"pageserve: cannot listen on --host {args.host} --port {args.port}: {error.strerror}",
            highlight=False,
        )
        return 1
    with listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Lifecycle(client, args, listener, console).run())


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; raises OSError if the address is taken or unknown."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def served_names(config: EngineConfig) -> tuple[str, ...]:
    """Names the API answers to, the default first: the given ones, then the model as given.

    A local path is called by its last part, so that answers never show the host's folders.
    """
    model = config.model.model
    name = Path(model).name.removesuffix(".gguf") if Path(model).exists() else model
    return tuple(dict.fromkeys((*config.model.served_model_name, name)))


def uvicorn_config(app: ASGIApp, args: ServerArgs) -> uvicorn.Config:
    """Return how uvicorn serves the app; raises :class:`ConfigError` for unusable certificates."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
    )
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    try:
        config.load()
    except OSError as error:  # also what the ssl module raises
        raise ConfigError(f"--ssl-certfile {args.ssl_certfile}: {error.strerror}") from None
    return config


def settle_garbage_collector() -> None:
    """Take what is loaded out of the collector's sight: no stream shall wait while it walks through
    all libraries, and no burst of long prompts shall set it off by itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal drains first, see _Lifecycle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Lifecycle:
    def __init__(
        self, client: ProcessClient, args: ServerArgs, listener: socket.socket, console: Console
    ) -> None:
        config = client.config
        override = config.model.override_generation_config
        self.overrides = parse_generation_defaults(override or "{}")
        self.args = args
        self.listener = listener
        self.console = console
        self.client = client
        self.context = ServingContext(
            client=client,
            config=args,
            model_names=served_names(config),
            engine_config=config,
        )
        self.leave = asyncio.Event()  # set by a signal
        self.http = _Server(
            uvicorn_config(build_app(self.context), args),
        )

    async def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self.args.ssl_certfile is None else "https"
        host = f"[{host}]" if ":" in host else host  # IPv6
        logger.info("listening on %s://%s:%d", scheme, host, port)
        self.client.watch()
        serving = asyncio.create_task(self.http.serve(sockets=[self.listener]))
        work = [asyncio.create_task(self._load()), asyncio.create_task(self._log_load())]
        leaving = asyncio.create_task(self.leave.wait())
        died = asyncio.create_task(self.client.stopped.wait())
        first = asyncio.FIRST_COMPLETED
        try:
            await asyncio.wait([leaving, died, work[0], serving], return_when=first)
            if work[0].done() and work[0].exception() is None:
                await asyncio.wait([leaving, died, serving], return_when=first)
            return await self._part(work[0])
        finally:  # an engine left running would keep this process from ending, and so a download
            self.leave.set()
            for task in (*work, leaving, died):
                task.cancel()
            await self.client.stop()
            self.http.should_exit = True
            await serving

    async def _part(self, load: asyncio.Task[None]) -> int:
        """Drain, or say why there is nothing left to serve; returns the exit code."""
        if self.leave.is_set():
            if load.done():
                logger.info("draining: at most %.0f s", self.args.drain_timeout)
                self.context.begin_drain()
                await self.context.wait_idle(self.args.drain_timeout)
            return 0
        if load.done() and (error := load.exception()) is not None:
            if not isinstance(error, ModelError | ConfigError):
                raise error
            logger.error("%s", error)
            return 1
        await asyncio.sleep(FAREWELL)
        return 1

    def _on_signal(self) -> None:
        if self.leave.is_set():  # the second one
            self.client.kill()
            os._exit(130)
        self.leave.set()

    async def _load(self) -> None:
        """Fetch the model, start the engine and read the tokenizer beside it."""
        config = self.client.config
        shown = asyncio.create_task(self._show_progress())

        def note(phase: str, done: int, total: int) -> None:
            if self.leave.is_set():  # nothing else ends a thread
                raise InterruptedError("told to leave")
            self.client.progress = LoadProgress(phase, done, total)

        try:
            path = await asyncio.to_thread(resolve_model, config.model.model, note)
            await self.client.start(str(path))
            tokenizer = await asyncio.to_thread(load_tokenizer, path, config.model.chat_template)
            defaults = self.overrides
            if config.model.generation_config == "auto":
                defaults = defaults.over(await asyncio.to_thread(load_generation_defaults, path))
            self.context.defaults = defaults
            self.context.tokenizer = tokenizer
            while self.client.ready is None and self.client.dead is None:
                await asyncio.sleep(0.02)
        finally:
            shown.cancel()
        settle_garbage_collector()
        if self.client.ready is not None:
            logger.info("ready: %s", ", ".join(self.context.model_names))

    async def _show_progress(self) -> None:
        """Draw bars on a terminal, write a line per phase elsewhere."""
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True) as bars:
            task, phase = bars.add_task("starting", total=None), "starting"
            while True:
                now = self.client.progress
                if now.phase != phase:
                    phase = now.phase
                    bars.remove_task(task)
                    task = bars.add_task(phase, total=now.total or None)
                    if not self.console.is_terminal:
                        logger.info("%s", phase)
                bars.update(task, completed=now.done, total=now.total or None)
                await asyncio.sleep(0.1)

    async def _log_load(self) -> None:
        """While requests run, one line every few seconds; nothing about any single request."""
        last_steps = 0
        while True:
            await asyncio.sleep(LOG_EVERY)
            stats = self.client.stats
            if stats.steps_total == last_steps:
                continue
            total = stats.num_free_blocks + stats.num_used_blocks
            queries = stats.prefix_cache_queries_total
            logger.info(
                "running %d, waiting %d, KV used %.0f %%, prefix hits %.0f %%, "
                "preemptions %d, %.1f steps/s",
                stats.num_running,
                stats.num_waiting,
                100 * stats.num_used_blocks / max(1, total),
                100 * stats.prefix_cache_hits_total / max(1, queries),
                stats.preemptions_total,
                (stats.steps_total - last_steps) / LOG_EVERY,
            )
            last_steps = stats.steps_total


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop  # type: ignore[return-value]
