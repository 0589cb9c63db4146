"""Answers that are made in one piece."""

from typing import Any

import orjson
from starlette.responses import Response


class JSONResponse(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the JSON of ``content``."""
        return orjson.dumps(content)
