"""uvicorn's connection, with the errors that come before there is a request made ours, and a way
around ASGI for the tokens of streams."""

import asyncio
import weakref
from functools import partial

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pageserve.api.errors import APIError

HEADER_TIMEOUT = 60.0  # seconds for a request's headers to arrive
BODY_TIMEOUT = 60.0  # the same for its body behind them
MAX_HEADER_BYTES = 65536


class Connection(HttpToolsProtocol):
    """Answers what is no HTTP with an error object, and waits for headers and bodies for a bounded
    time: then it hangs up with no answer, as the SDK would take a 408 as "send it again".

    ``scope["write_body"]`` is :func:`write_body` for the request.
    """

    _timer: asyncio.TimerHandle | None = None  # runs while headers are awaited
    _body_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _has_begun = False  # whether a request began with the latest bytes
    _unfinished_bytes = 0  # read since then while its headers are not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        self._stop_waiting_for_body()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless a line that never ends makes the headers too large: the parser keeps it,
        and shows it only once it has ended."""
        self._has_begun = False
        super().data_received(data)
        if self._timer is None or self._has_begun or self.transport.is_closing():
            return
        self._unfinished_bytes += len(data)
        if self._unfinished_bytes > MAX_HEADER_BYTES:
            self.send_400_response("the headers are too large")

    def on_message_begin(self) -> None:
        """Wait for the headers of a request that has begun."""
        super().on_message_begin()
        self._has_begun = True
        self._header_bytes = self._unfinished_bytes = 0
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL, which counts as a header does."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, unless there are too many bytes of them."""
        self._count(name + value)
        super().on_header(name, value)

    def _count(self, part: bytes) -> None:
        self._header_bytes += len(part)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # the parser stops and data_received asks

    def on_headers_complete(self) -> None:
        """Begin to answer, and wait for the body."""
        self._stop_waiting()
        self._await_body()
        super().on_headers_complete()
        # Weakly, as the cycle has the scope.
        self.scope["write_body"] = partial(write_body, weakref.ref(self.cycle))  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        """Go on with a whole request."""
        self._stop_waiting_for_body()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP request, and hang up."""
        too_large = max(self._header_bytes, self._unfinished_bytes) > MAX_HEADER_BYTES
        if too_large:
            error = APIError(431, "request_too_large", "the request's headers are too large")
            line = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
        else:
            error = APIError(400, "invalid_http", "the request is not valid HTTP/1.1")
            line = b"HTTP/1.1 400 Bad Request\r\n"
        body = error.body()
        self.transport.write(
            line + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            + b"connection: close\r\n\r\n" + body
        )  # fmt: skip
        self.transport.close()

    def _await_headers(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEADER_TIMEOUT, self._headers_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _headers_late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._await_headers()  # pipelined behind an answer that must not be cut

    def _await_body(self) -> None:
        self._body_timer = self.loop.call_later(BODY_TIMEOUT, self._body_late)

    def _stop_waiting_for_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _body_late(self) -> None:
        if self.pipeline or self.flow.read_paused:
            self._await_body()  # it is behind an answer that must not be cut, or we do not read it
        else:
            self.transport.close()


def write_body(reference: "weakref.ref[RequestResponseCycle]", data: bytes) -> bool:
    """Write a part of a streamed body now, if that needs no waiting; return whether it was done.

    The same part as an ASGI message takes a coroutine, and so a task that is switched to.
    """
    cycle = reference()
    if cycle is None or cycle.response_complete:
        return False
    if cycle.flow.write_paused or not cycle.chunked_encoding:
        return False
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True
