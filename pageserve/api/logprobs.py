"""Log probabilities in the two shapes of the API."""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from pageserve.engine.output_processor import LogprobEntry

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class LogprobFormat(Protocol):
    """Turns the entries of one choice into JSON values, piece by piece."""

    def format(self, entries: Sequence[LogprobEntry]) -> Any:
        """Return the ``logprobs`` object of the next entries."""
        ...


class ChatLogprobs:
    """``{"content": [{token, bytes, logprob, top_logprobs}], "refusal": null}``."""

    def format(self, entries: Sequence[LogprobEntry]) -> Any:
        """Return the ``logprobs`` object of the next entries."""
        return {
            "content": [
                {**_plain(entry), "top_logprobs": [_plain(top) for top in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }


class CompletionLogprobs:
    """Parallel arrays ``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``."""

    def __init__(self) -> None:
        # Counts characters like the text does, so that an offset is an index into it.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def format(self, entries: Sequence[LogprobEntry]) -> Any:
        """Return the ``logprobs`` object of the next entries; offsets continue over calls."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(entry.bytes or b"")))
        return {
            "tokens": [_key(entry) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [_by_key([*entry.top, entry]) for entry in entries],
            "text_offset": offsets,
        }


def _plain(entry: LogprobEntry) -> dict[str, Any]:
    data = None if entry.bytes is None else list(entry.bytes)
    return {"token": entry.token, "bytes": data, "logprob": _finite(entry.logprob)}


def _by_key(entries: Sequence[LogprobEntry]) -> dict[str, float]:
    best: dict[str, float] = {}
    for entry in entries:
        key = _key(entry)
        best[key] = max(best.get(key, MIN_LOGPROB), _finite(entry.logprob))
    return best


def _key(entry: LogprobEntry) -> str:
    """Return a name that two different tokens cannot share: escapes are marked as such."""
    try:
        bytes(entry.bytes or b"").decode()
    except UnicodeDecodeError:
        return "bytes:" + entry.token
    return entry.token


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
