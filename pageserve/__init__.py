"""pageserve: a self-hosted, OpenAI-compatible LLM inference server."""

from importlib import metadata

try:
    __version__ = metadata.version("pageserve")
except metadata.PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0.0.0"
