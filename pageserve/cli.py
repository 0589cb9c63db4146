"""The command line: ``pageserve serve | chat | plan``. Each command parses its own flags."""

import argparse
import sys
from collections.abc import Callable, Sequence

from pageserve.checkpoint import ModelError
from pageserve.config import ConfigError, EngineConfig, ServerArgs, add_flags, from_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "serve": serve,
        "chat": chat,
        "plan": plan,
    }
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    parser = argparse.ArgumentParser(prog="pageserve", description="A self-hosted LLM server.")
    parser.add_argument(
        "command",
        choices=commands,
        help="serve the OpenAI API, chat with a server, or plan memory; each has its own --help",
    )
    parser.parse_args(argv[:1])
    return 2  # parse_args has left already, unless argv was a bare --help


def serve(argv: Sequence[str]) -> int:
    """Serve the OpenAI API until a signal or the engine's death; returns the exit code."""
    config, server_args = _parse("serve", "Serve the OpenAI API.", argv)
    from pageserve.engine.process import ProcessClient

    client = ProcessClient(config)
    try:
        client.launch()  # first of all: it imports for seconds, and so do we
        from pageserve.api.server import run_server

        return run_server(client, server_args)
    except ConfigError as error:
        print(f"pageserve serve: {error}", file=sys.stderr)
        return 2
    finally:
        client.kill()


def plan(argv: Sequence[str]) -> int:
    """Print what a configuration would take and hold, without loading weights."""
    config, _ = _parse(
        "plan", "Print the memory plan.", argv, groups=("model", "memory", "scheduling")
    )
    try:
        print(_plan_text(config))
    except (ConfigError, ModelError) as error:
        print(f"pageserve plan: {error}", file=sys.stderr)
        return 2
    return 0


def chat(argv: Sequence[str]) -> int:
    """Talk to a running server from the terminal."""
    from pageserve.chat import run_chat

    parser = argparse.ArgumentParser(prog="pageserve chat", description=chat.__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL of the server")
    parser.add_argument("--model", help="served model name (default: the server's first)")
    parser.add_argument("--api-key", help="bearer key")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    return run_chat(**vars(parser.parse_args(argv)))


def _parse(
    command: str, description: str, argv: Sequence[str], groups: tuple[str, ...] = ()
) -> tuple[EngineConfig, ServerArgs]:
    parser = argparse.ArgumentParser(
        prog=f"pageserve {command}",
        usage="%(prog)s [flags]",  # a list of all flags would be longer than the sections below
        description=description,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=120),
    )
    add_flags(parser, *groups)
    try:
        return from_flags(parser.parse_args(argv))
    except ConfigError as error:
        parser.error(str(error))


def _plan_text(config: EngineConfig) -> str:
    import torch

    from pageserve.hub import resolve_model
    from pageserve.model_config import load_model_config
    from pageserve.models import DecoderForCausalLM
    from pageserve.worker.memory import GIB, activation_bytes, plan_memory
    from pageserve.worker.worker import choose_device, free_device_bytes, make_backend, resolve

    path = resolve_model(config.model.model, None)
    model = load_model_config(path)
    config = resolve(config, model, choose_device(config.model.device))
    shapes = DecoderForCausalLM(
        model, make_backend(config, model), 1, getattr(torch, config.model.dtype), "meta"
    )
    weight_bytes = shapes.weight_bytes(config.model.device)
    to_come = weight_bytes + activation_bytes(config, model)
    memory = plan_memory(
        config,
        model,
        weight_bytes=weight_bytes,
        free_bytes=free_device_bytes(config, reserve=to_come),
    )
    scheduler = config.scheduler
    num_tokens = memory.num_blocks * memory.block_size
    size = f"{model.num_parameters / 1e6:.1f} M parameters"
    rows = [
        ("model", f"{config.model.model} ({model.architecture}, {size})"),
        ("device", f"{config.model.device}, {config.model.dtype}"),
        ("weights", f"{memory.weight_bytes / GIB:.2f} GiB"),
        (
            "KV pool",
            f"{memory.pool_bytes / GIB:.2f} GiB: {memory.num_blocks} blocks of "
            f"{memory.block_size} tokens, {memory.block_bytes / 2**10:.0f} KiB each",
        ),
        ("tokens resident", f"{num_tokens}"),
        ("longest request", f"{min(memory.max_model_len, num_tokens + 1)} tokens"),
        (
            "max concurrency",
            f"{memory.max_concurrency:.1f} requests of full length "
            f"(--max-num-seqs {scheduler.max_num_seqs})",
        ),
        ("tokens per step", f"{scheduler.max_num_batched_tokens}"),
    ]
    return "\n".join(f"{name:<17} {text}" for name, text in rows)
