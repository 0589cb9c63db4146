"""Configuration: frozen dataclasses, one source of defaults, flags generated from the fields.

A field's ``help`` metadata is its documentation and its line in ``--help``. Values that depend on
the model or the device default to None and are filled by :meth:`EngineConfig.resolve`, which
returns a new object; nothing is ever mutated.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

DEMO_MODEL = "SmolLM2-135M-Instruct"

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["fcfs", "priority", "memory-aware", "shortest-prompt"]
Backend = Literal["auto", "torch_blockwise", "triton"]


class ConfigError(ValueError):
    """A configuration cannot work; the message names the flag to change."""


def _opt(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


class _Checked:
    """Checks each field's value when an object is made, from flags or from keywords."""

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` naming the flag of the first impossible value."""
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value is not None:
                _check(flag_of(f.name), value, hints[f.name], f.metadata)


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def _check(flag: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> None:
    choices = _unwrap(hint)[1]
    if choices and value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value}")
    low, high = metadata.get("min"), metadata.get("max")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{flag} must be a finite number, got {value}")
    if low is not None and value < low:
        raise ConfigError(f"{flag} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise ConfigError(f"{flag} must be at most {high}, got {value}")


def _unwrap(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    """Return (value type, choices, repeatable) of a field's type hint."""
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint), False
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], (), True
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None)), (), False
    return hint, (), False


@dataclass(frozen=True)
class ModelArgs(_Checked):
    """Which model, in which precision, on which device."""

    model: str = _opt(DEMO_MODEL, "directory, hub id or .gguf file (default: the embedded model)")
    served_model_name: tuple[str, ...] = _opt((), "names the API answers to (default: the model)")
    device: Device = _opt("auto", "where to run")
    dtype: Dtype = _opt("auto", "precision (default: float32 on CPU, else the checkpoint's)")
    max_model_len: int | None = _opt(None, "longest prompt + output in tokens", min=1)
    attention_backend: Backend = _opt("auto", "attention implementation")
    chat_template: str | None = _opt(None, "file with a Jinja chat template")
    generation_config: Literal["auto", "none"] = _opt("auto", "use the model's sampling defaults?")
    override_generation_config: str | None = _opt(
        None, "JSON object of sampling defaults that go before the model's"
    )
    seed: int | None = _opt(None, "seed for requests that give none (default: random)")


@dataclass(frozen=True)
class CacheArgs(_Checked):
    """The paged KV pool."""

    block_size: int = _opt(16, "tokens per KV block", min=1, max=1024)
    num_kv_blocks: int | None = _opt(
        None, "size of the pool in blocks (default: fit memory)", min=1
    )
    kv_cache_memory: float | None = _opt(None, "size of the pool in GiB", min=0)
    gpu_memory_utilization: float = _opt(0.9, "share of GPU memory to use", min=0.05, max=1)
    enable_prefix_caching: bool = _opt(True, "reuse blocks of equal prompt prefixes (default: yes)")

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` for impossible or contradicting values."""
        super().__post_init__()
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("give --num-kv-blocks or --kv-cache-memory, not both")


@dataclass(frozen=True)
class SchedulerArgs(_Checked):
    """What runs in a step."""

    max_num_seqs: int | None = _opt(None, "requests per step (default: 32, 512 on GPU)", min=1)
    max_num_batched_tokens: int | None = _opt(
        None, "tokens per step (default: 512, 8192 on GPU)", min=1
    )
    scheduling_policy: Policy = _opt("fcfs", "order of the queue")
    max_steps_in_flight: int | None = _opt(
        None, "1: synchronous, 2: plan a step while the last one runs", min=1, max=2
    )
    enforce_eager: bool = _opt(False, "no CUDA graphs, for debugging")
    trace: str | None = _opt(None, "write what each step held to this file, for ui.perfetto.dev")


@dataclass(frozen=True)
class ServerArgs(_Checked):
    """The HTTP side."""

    host: str = _opt("127.0.0.1", "address to listen on")
    port: int = _opt(8000, "port to listen on (0: any free one)", min=0, max=65535)
    api_key: tuple[str, ...] = _opt((), "accept these bearer keys only (repeatable)")
    api_keys_file: str | None = _opt(None, "TOML or JSON file of keys with names and limits")
    protect_metrics: bool = _opt(False, "ask for a key on /metrics too")
    ssl_certfile: str | None = _opt(None, "serve HTTPS with this certificate (PEM)")
    ssl_keyfile: str | None = _opt(None, "private key of the certificate, if it is not in its file")
    root_path: str = _opt("", "URL prefix added by a proxy")
    allow_origin: tuple[str, ...] = _opt((), "CORS origin to allow (repeatable)")
    ui: bool = _opt(True, "serve a page to chat on at / (default: yes)")
    strict_params: bool = _opt(False, "refuse unknown request fields instead of listing them")
    strict_context: bool = _opt(False, "refuse prompt + max_tokens beyond the context: no clamping")
    escape_special_in_content: bool = _opt(
        False, "read special tokens spelled in chat messages as plain text"
    )
    trust_request_template: bool = _opt(
        False, "render chat templates that requests bring, in processes with limits"
    )
    any_model: bool = _opt(False, "serve requests for any model name with the default model")
    max_stop: int = _opt(16, "stop strings a request may have", min=1, max=1024)
    max_queue: int = _opt(1024, "waiting requests before 503", min=1)
    max_queued_tokens: int | None = _opt(None, "waiting prompt tokens before 503", min=1)
    queue_timeout: float | None = _opt(
        None, "seconds a request may wait to be run (504)", min=0.001
    )
    default_deadline: float | None = _opt(
        None, "seconds for requests that bring no deadline_ms (504)", min=0.001
    )
    timings: bool = _opt(False, "put a timings object into every reply")
    max_body_mib: float = _opt(32.0, "largest request body in MiB", min=0)
    sse_keepalive: float = _opt(15.0, "seconds of silence before an SSE comment (0: never)", min=0)
    drain_timeout: float = _opt(30.0, "seconds to finish running requests on SIGTERM", min=0)
    stall_timeout: float = _opt(60.0, "seconds without a step before /live fails", min=1)
    tool_grammar: Literal["on", "off"] = _opt("on", "hold calls begun freely to their schemas?")
    reasoning_field: Literal["reasoning_content", "reasoning", "none"] = _opt(
        "reasoning_content", "key of <think> blocks (none: leave them)"
    )
    log_format: Literal["text", "json"] = _opt(
        "text", "json: objects with request ids, and one for each answer"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _opt("info", "log verbosity")


GROUPS = {
    "model": ModelArgs,
    "memory": CacheArgs,
    "scheduling": SchedulerArgs,
    "server": ServerArgs,
}


@dataclass(frozen=True)
class EngineConfig:
    """All that the engine process needs to know."""

    model: ModelArgs = ModelArgs()
    cache: CacheArgs = CacheArgs()
    scheduler: SchedulerArgs = SchedulerArgs()

    def resolve(self, *, device: str, max_position_embeddings: int) -> Self:
        """Return a copy in which every value that depends on device and model is concrete.

        Raises :class:`ConfigError` where the user asked for more than the model can do.
        """
        on_gpu = device == "cuda"
        max_model_len = self.model.max_model_len or min(max_position_embeddings, 32768)
        if max_model_len > max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than the model's context of "
                f"{max_position_embeddings} tokens"
            )
        if self.scheduler.enforce_eager and not on_gpu:
            raise ConfigError("--enforce-eager is about CUDA graphs; leave it out on " + device)
        replace = dataclasses.replace
        scheduler = replace(
            self.scheduler,
            max_num_seqs=self.scheduler.max_num_seqs or (512 if on_gpu else 32),
            max_num_batched_tokens=self.scheduler.max_num_batched_tokens
            or (8192 if on_gpu else 512),
            max_steps_in_flight=self.scheduler.max_steps_in_flight or (2 if on_gpu else 1),
        )
        model = replace(self.model, device=device, max_model_len=max_model_len)
        return replace(self, model=model, scheduler=scheduler)


# --- flags ----------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, *groups: str) -> None:
    """Add one flag per dataclass field of the named groups (all if none is named)."""
    for title in groups or GROUPS:
        section = parser.add_argument_group(title)
        hints = typing.get_type_hints(GROUPS[title])
        for f in dataclasses.fields(GROUPS[title]):
            _add_flag(section, f, hints[f.name])


def from_flags(namespace: argparse.Namespace) -> tuple[EngineConfig, ServerArgs]:
    """Build the configuration from parsed flags; groups that were not added keep defaults."""

    def build(cls: type) -> Any:
        given = {
            f.name: getattr(namespace, f.name)
            for f in dataclasses.fields(cls)
            if hasattr(namespace, f.name)
        }
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})

    engine = EngineConfig(build(ModelArgs), build(CacheArgs), build(SchedulerArgs))
    return engine, build(ServerArgs)


def _add_flag(section: Any, f: dataclasses.Field[Any], hint: Any) -> None:
    name = flag_of(f.name)
    text = f.metadata["help"].replace("%", "%%")
    kind, choices, repeat = _unwrap(hint)
    if kind is bool:
        section.add_argument(
            name, action=argparse.BooleanOptionalAction, default=f.default, help=text
        )
        return
    if f.default not in (None, "", ()) and "default" not in text:
        text += f" (default: {f.default})"
    options: dict[str, Any] = {"default": f.default, "help": text, "dest": f.name}
    if repeat:
        options |= {"action": "append", "default": []}
    if choices:
        options["choices"] = choices
    else:
        options["type"] = kind
        options["metavar"] = {int: "N", float: "X"}.get(kind, "S")
    section.add_argument(name, **options)
