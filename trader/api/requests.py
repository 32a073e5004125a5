"""Every request passes here twice: to get its id, and at its end for its line in the log and for the metrics."""

import secrets
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from itertools import count
from typing import Final

from aiohttp import web

from trader.logs import note_request

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""The id of a request that is not a call, or whose response is begun before its end."""

BEGUN: Final = web.RequestKey("begun", bool)
"""Set when the response to a request has begun."""

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the latency histogram, in seconds."""

UNKNOWN: Final = "unknown"
"""The name of every request for what there is not: callers must not make names."""


class Latencies:
    """The durations of the requests of one name and status: how many fell into each bucket, the last for the rest."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0


class RequestLog:
    """Numbers the requests of this process, and notes how each ended."""

    def __init__(self) -> None:
        self._boot = secrets.token_hex(4)
        self._count = count(1)
        self.latencies: defaultdict[tuple[str, int], Latencies] = defaultdict(Latencies)

    def new_id(self) -> str:
        """An id that is unique among the processes of the service, as far as a log goes back."""
        return f"{self._boot}-{next(self._count):06x}"

    def finished(self, name: str, status: int, started_s: float, request_id: str) -> None:
        """A request has ended. `name` is one of a few; `started_s` was read from `time.perf_counter`."""
        duration_s = time.perf_counter() - started_s
        latencies = self.latencies[name, status]
        latencies.counts[bisect_left(BUCKETS_S, duration_s)] += 1
        latencies.sum_s += duration_s
        note_request(request_id, name, status, duration_s * 1000)


def noted(name: str, handler: Handler) -> Handler:
    """The handler with an id for each request, and a note at its end."""

    async def handle(request: web.Request) -> web.StreamResponse:
        requests = request.app.get(REQUESTS)
        if requests is None:
            return await handler(request)
        started_s = time.perf_counter()
        request[REQUEST_ID] = request_id = requests.new_id()
        status = HTTPStatus.INTERNAL_SERVER_ERROR.value
        try:
            response = await handler(request)
            status = response.status
        finally:
            requests.finished(name, status, started_s, request_id)
        return response

    return handle


REQUESTS: Final = web.AppKey("requests", RequestLog)
