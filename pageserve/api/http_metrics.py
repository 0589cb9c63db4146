"""Metrics of HTTP itself, under the names of the common FastAPI instrumentation."""

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

HIGHR_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30,
    60,
)  # fmt: skip
BUCKETS = (0.1, 0.5, 1)


class HttpMetrics:
    """Counts answers by route. Handlers are route patterns, so no client can make a series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "answers by route and status class",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "time to answer by route, streams to their end",
            ("handler", "method"),
            registry=registry,
            buckets=BUCKETS,
        )
        self._highr = Histogram(
            "http_request_duration_highr_seconds",
            "time to answer, in fine buckets",
            registry=registry,
            buckets=HIGHR_BUCKETS,
        )
        self._request_size = Summary(
            "http_request_size_bytes", "declared size of bodies", ("handler",), registry=registry
        )
        self._response_size = Summary(
            "http_response_size_bytes",
            "declared size of answers; streams count as 0",
            ("handler",),
            registry=registry,
        )

    def count(
        self,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        request_size: int,
        response_size: int,
    ) -> None:
        """Count an answer; a status of 0 means that the client left before there was one."""
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)
        self._highr.observe(seconds)
        self._request_size.labels(handler).observe(request_size)
        self._response_size.labels(handler).observe(response_size)
