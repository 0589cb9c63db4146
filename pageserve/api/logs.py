"""Log lines as JSON objects, each with the id of the request it belongs to."""

import logging
from contextvars import ContextVar
from datetime import UTC, datetime

import orjson

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the request being served


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and request_id inside a request.

    A record's ``fields`` attribute adds members of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            line["request_id"] = request_id.get()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line | getattr(record, "fields", {}), default=str).decode()
