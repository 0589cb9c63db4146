"""Log probabilities in the two shapes of the API."""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from pageserve.engine.output_processor import MIN_LOGPROB, LogprobEntry


class LogprobFormat(Protocol):
    """Turns the entries of one choice into JSON values, piece by piece."""

    def format(self, entries: Sequence[LogprobEntry]) -> Any:
        """Return the ``logprobs`` object of the next entries."""
        ...


class ChatLogprobs:
    """``{"content": [{token, bytes, logprob, top_logprobs}], "refusal": null}``."""

    def __init__(self, as_ids: bool = False) -> None:
        """``as_ids`` names tokens ``token_id:N``."""
        self._as_ids = as_ids

    def format(self, entries: Sequence[LogprobEntry]) -> Any:
        """Return the ``logprobs`` object of the next entries."""
        return {
            "content": [
                {**self._plain(entry), "top_logprobs": [self._plain(top) for top in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def _plain(self, entry: LogprobEntry) -> dict[str, Any]:
        data = None if entry.bytes is None else list(entry.bytes)
        token = _id_name(entry) if self._as_ids else entry.token
        return {"token": token, "bytes": data, "logprob": _finite(entry.logprob)}


class CompletionLogprobs:
    """Parallel arrays ``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``."""

    def __init__(self, as_ids: bool = False, strips_space: bool = False) -> None:
        """``as_ids`` names tokens ``token_id:N``; ``strips_space`` says that the text begins behind
        the space that its first token has."""
        # Counts characters like the text does, so that an offset is an index into it.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = -int(strips_space)
        self._name = _id_name if as_ids else _key

    def format_prompt(self, entries: Sequence[LogprobEntry], text: str) -> dict[str, list[Any]]:
        """Return the arrays of an echoed prompt, whose first token has no log probability;
        what comes next is counted from the end of ``text``."""
        arrays: dict[str, list[Any]] = self.format(entries)
        arrays["token_logprobs"][0] = arrays["top_logprobs"][0] = None
        arrays["text_offset"] = [max(0, min(x, len(text))) for x in arrays["text_offset"]]
        self._decoder.reset()
        self._offset = len(text)
        return arrays

    def format(self, entries: Sequence[LogprobEntry]) -> Any:
        """Return the ``logprobs`` object of the next entries; offsets continue over calls."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(entry.bytes or b"")))
        return {
            "tokens": [self._name(entry) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._by_name([*entry.top, entry]) for entry in entries],
            "text_offset": offsets,
        }

    def _by_name(self, entries: Sequence[LogprobEntry]) -> dict[str, float]:
        best: dict[str, float] = {}
        for entry in entries:
            key = self._name(entry)
            best[key] = max(best.get(key, MIN_LOGPROB), _finite(entry.logprob))
        return best


def _id_name(entry: LogprobEntry) -> str:
    return f"token_id:{entry.token_id}"


def _key(entry: LogprobEntry) -> str:
    """Return a name that two different tokens cannot share: escapes are marked as such."""
    try:
        bytes(entry.bytes or b"").decode()
    except UnicodeDecodeError:
        return "bytes:" + entry.token
    return entry.token


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
