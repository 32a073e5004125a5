"""RPC endpoint: the dispatch of procedures, and the HTTP status of each error.

Every error raised by a procedure is answered here. An error without a status in `STATUSES` is a bug: it is logged with
the request id, and answered with 500 without its cause.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar

from aiohttp import hdrs, web
from multidict import CIMultiDict

from trader.api import batch, envelope
from trader.api.compression import BYTES_MIN, GZIP, accepts_gzip
from trader.api.context import ACCESS, Context
from trader.api.envelope import BodyStyle
from trader.api.registry import REGISTRY, Procedure, Registry, load_procedures
from trader.api.requests import INFO, REQUESTS, UNKNOWN, BodyTimeout, address_of, arrived_body, read_body
from trader.api.response_cache import INPUT_BYTES_MAX, Answer, ResponseCache
from trader.api.routes import JSON, answer_expectation, refusal
from trader.api.schemas.common import LongOutput, encoded
from trader.api.turns import Turns
from trader.core.errors import (
    Conflict,
    Forbidden,
    ForeignAccount,
    InvalidInput,
    Issue,
    KeyRevoked,
    ManualOrdersOff,
    MarketUnavailable,
    MissingScope,
    NotFound,
    PayloadTooLarge,
    Precondition,
    ReadingClosed,
    SeasonOver,
    TooManyRequests,
    TraderError,
    Unauthorized,
    Unavailable,
    ViewDecided,
    ViewExpired,
    ViewUnknown,
)
from trader.core.inputs import decode_input
from trader.exchange.service_level import Outcomes
from trader.operations.access import Access, Caller, require_agent, require_operator, require_reader
from trader.operations.domain.credentials import Credential, Scope
from trader.settings.settings import Settings

PREFIX: Final = "/api/rpc/"

OTHERS: Final = "rpc"
"""The name of the catch-all resource below `PREFIX`, for requests to paths without a procedure."""

LARGE_BYTES: Final = 1_000_000
"""Answers above this size are counted for monitoring."""

LARGE_LOGGED_EVERY_S: Final = 3600.0

LONG_AT_ONCE: Final = 2
"""How many long answers are made at the same time for anonymous callers, and as many for known ones."""

PARSED_INLINE_BYTES_MAX: Final = 4096
"""Maximum bytes of a body parsed on the event loop, which takes 2 ms at most; 64 KiB take up to 30 ms."""

T = TypeVar("T")

_log = logging.getLogger("trader.request")

INTERNAL: Final = (HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_SERVER_ERROR")
STATUSES: Final[Mapping[type[TraderError], tuple[HTTPStatus, str]]] = {
    InvalidInput: (HTTPStatus.BAD_REQUEST, "VALIDATION_ERROR"),
    Unauthorized: (HTTPStatus.UNAUTHORIZED, "UNAUTHORIZED"),
    KeyRevoked: (HTTPStatus.UNAUTHORIZED, "KEY_REVOKED"),
    Forbidden: (HTTPStatus.FORBIDDEN, "FORBIDDEN"),
    MissingScope: (HTTPStatus.FORBIDDEN, "MISSING_SCOPE"),
    ForeignAccount: (HTTPStatus.FORBIDDEN, "FOREIGN_ACCOUNT"),
    ManualOrdersOff: (HTTPStatus.FORBIDDEN, "MANUAL_ORDERS_OFF"),
    NotFound: (HTTPStatus.NOT_FOUND, "NOT_FOUND"),
    ViewUnknown: (HTTPStatus.NOT_FOUND, "VIEW_UNKNOWN"),
    Conflict: (HTTPStatus.CONFLICT, "CONFLICT"),
    ViewExpired: (HTTPStatus.CONFLICT, "VIEW_EXPIRED"),
    ViewDecided: (HTTPStatus.CONFLICT, "VIEW_DECIDED"),
    SeasonOver: (HTTPStatus.CONFLICT, "SEASON_OVER"),
    Precondition: (HTTPStatus.PRECONDITION_FAILED, "PRECONDITION_FAILED"),
    PayloadTooLarge: (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "PAYLOAD_TOO_LARGE"),
    BodyTimeout: (HTTPStatus.REQUEST_TIMEOUT, "TIMEOUT"),
    TooManyRequests: (HTTPStatus.TOO_MANY_REQUESTS, "TOO_MANY_REQUESTS"),
    Unavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "SERVICE_UNAVAILABLE"),
    MarketUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "SERVICE_UNAVAILABLE"),
}
ANSWERED: Final = tuple(STATUSES)
"""The errors that are reported to the caller."""

NOT_SUPPORTED: Final = (HTTPStatus.METHOD_NOT_ALLOWED, "METHOD_NOT_SUPPORTED")
_NOT_FOUND: Final = Answer(HTTPStatus.NOT_FOUND, b'{"error":"Not Found"}')


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The procedure and the caller style of a raw path. There is one object per path."""

    procedure: Procedure
    style: BodyStyle


class LargeAnswers:
    """Counts answers over `LARGE_BYTES` by procedure, and logs a size at most once an hour per procedure."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}

    def note(self, name: str, size: int) -> None:
        """Count the answer if it is large."""
        if size <= LARGE_BYTES:
            return
        self.counts[name] += 1
        now_s = time.monotonic()
        if now_s - self._logged_s.get(name, -math.inf) >= LARGE_LOGGED_EVERY_S:
            self._logged_s[name] = now_s
            _log.warning("an answer of %s has %.1f MB before compression", name, size / 1e6)


class DispatchContext(Protocol):
    """The part of the procedures' context that the dispatcher itself needs."""

    @property
    def settings(self) -> Settings: ...


class Dispatcher:
    """Answers every request under `/api/rpc/`."""

    def __init__(self, registry: Registry, context: DispatchContext) -> None:
        self.procedures = registry.procedures
        self._context = context
        self._has_api_token = context.settings.api_token is not None
        self._is_public = context.settings.public == "on"
        self._live = context.settings.trading_mode == "live"
        self._targets: dict[str, Target] = {}
        self._enveloped: dict[str, Target] = {}
        for name, declared in registry.procedures.items():
            for path, style in ((name, BodyStyle.PLAIN), (name.replace(".", "/"), BodyStyle.ORPC)):
                self._targets[PREFIX + path] = self._targets[f"{PREFIX}{path}/"] = Target(declared, style)
            self._enveloped[name] = self._targets[PREFIX + path]
        self._turns = Turns(LONG_AT_ONCE)
        self._parsing = Turns()
        self.cache = ResponseCache()
        self.large_answers = LargeAnswers()
        self.outcomes = Outcomes()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the procedures, and a route for batches, which are accepted on every path."""
        calls = [
            web.post(path, partial(self._handle, target), expect_handler=answer_expectation)
            for path, target in self._targets.items()
        ]
        others = web.post(PREFIX + "{path:.*}", self._handle_other, name=OTHERS, expect_handler=answer_expectation)
        return [*calls, others]

    async def _handle(self, target: Target, request: web.Request) -> web.StreamResponse:
        """Handle a call of a procedure, or a batch on its path."""
        if batch.HEADER in request.headers or request.rel_url.raw_path not in self._targets:  # `%2E` is not a dot here
            return await self._handle_other(request)
        info = request[INFO]
        info.changes = target.procedure.changes
        self._check_reading(target.procedure, request.app[ACCESS], info.caller)
        body = arrived_body(request)
        if body is None:
            body = await read_body(request)
        answer = await self.cached_or_call(target, body, info.caller, info.id)
        return _response(answer) if len(answer.body) < BYTES_MIN else await self._long_response(request, target, answer)

    async def _handle_other(self, request: web.Request) -> web.StreamResponse:
        """Handle a batch, or answer 404."""
        mode = request.headers.get(batch.HEADER)
        if mode is None:
            return _response(_NOT_FOUND)
        info = request[INFO]
        info.name = "batch"
        body = await read_body(request)
        items = await self._parsed(info.caller, body, batch.parse, body)

        async def call(index: int, item: batch.Item) -> batch.Reply:
            answer = await self._call_item(request, item, info.caller, f"{info.id}.{index}")
            return batch.Reply(index, answer.status, answer.headers, answer.body)

        return await batch.respond(request, items, call, mode, HTTPStatus.MULTI_STATUS)

    def refuse_path(self, request: web.Request) -> web.Response:
        """Answer a request other than POST: 405 at the path of a procedure, else 404."""
        target = self._targets.get(request.rel_url.raw_path)
        if target is None:
            return _response(_NOT_FOUND)
        request[INFO].name = target.procedure.name
        return _response(_method_not_supported(request.method, target.style))

    def style_of(self, request: web.Request) -> BodyStyle:
        """Return the style of an answer before the request body is known."""
        target = self._targets.get(request.rel_url.raw_path)
        is_enveloped = batch.HEADER in request.headers or (target is not None and target.style is BodyStyle.ORPC)
        return BodyStyle.ORPC if is_enveloped else BodyStyle.PLAIN

    async def _long_response(self, request: web.Request, target: Target, answer: Answer) -> web.Response:
        """Return the response, with gzip that is computed once for all callers that accept it."""
        self.large_answers.note(target.procedure.name, len(answer.body))
        response = _response(answer)
        response.headers[hdrs.VARY] = hdrs.ACCEPT_ENCODING
        if accepts_gzip(request):
            response.body = await answer.compressed()
            response.headers[hdrs.CONTENT_ENCODING] = GZIP
        return response

    async def cached_or_call(self, target: Target, body: bytes, caller: Caller, request_id: str) -> Answer:
        """Return the cached answer to the same input, or call the procedure if its data has changed.

        :raises Unavailable: its answer is long, and too many calls of the same source wait for their turn
        """
        token_of, key = target.procedure.token, (target, body)
        if token_of is not None and (answer := self.cache.find(key, token_of(self._context))) is not None:
            return answer
        async with self._turns.of(caller) if target.procedure.long else nullcontext():
            if token_of is None or len(body) > INPUT_BYTES_MAX or (token := token_of(self._context)) is None:
                return await self.call(target, body, caller, request_id)
            return self.cache.find(key, token) or await self.cache.make(
                key, token, lambda: self.call(target, body, caller, request_id)
            )

    async def call(self, target: Target, body: bytes, caller: Caller, request_id: str) -> Answer:
        """Call the procedure with a request body. Every error becomes an answer here."""
        style, text, issue = await self._parsed(caller, body, envelope.unwrap, body, target.style)
        declared = target.procedure
        try:
            if issue is not None:
                raise InvalidInput(issue)
            keys = self._check_allowed(declared, caller)
            request = await self._parsed(caller, body, decode_input, declared.input_decoder, declared.input_type, text)
            with self.outcomes.watch(f"calls of {declared.name}", bugs_only=True):
                output = await self._output(declared, request, keys)
            return Answer(HTTPStatus.OK, envelope.success(style, output))
        except TraderError as error:
            if _status_of(error) is not INTERNAL:
                return _error_answer(error, style)
            _log.exception("%s failed (request %s)", declared.name, request_id)
        except Exception:  # noqa: BLE001 - the RPC edge: a bug is answered without its cause and must not end the process
            _log.exception("%s failed (request %s)", declared.name, request_id)
        return _failure(style, INTERNAL, "Internal server error")

    async def _parsed(self, caller: Caller, body: bytes, parse: Callable[..., T], *arguments: Any) -> T:
        """Parse a body. Long bodies are parsed in a thread, in turns, so that they delay no other callers."""
        if len(body) <= PARSED_INLINE_BYTES_MAX:
            return parse(*arguments)
        async with self._parsing.of(caller):
            return await asyncio.to_thread(parse, *arguments)

    def _check_reading(self, declared: Procedure, access: Access, caller: Caller) -> None:
        """Check that the caller may read, unless the procedure checks its caller itself."""
        if access.closes_reading and not declared.changes and declared.scope is None:
            require_reader(caller, declared.name)

    def _check_allowed(self, declared: Procedure, caller: Caller) -> tuple[Credential, ...]:
        """Return the caller's credentials to pass to the handler: an agent's key, or nothing."""
        if self._live and declared.paper_only:
            raise Precondition(f"{declared.name} needs TRADING_MODE=simulated; this service runs with live")
        if declared.scope is not None:
            return (require_agent(caller, declared.scope, declared.name),)
        is_guarded = declared.changes or declared.operates or (declared.private and self._is_public)
        is_open = not self._has_api_token and not self._is_public and caller.credential is None
        if not is_guarded or is_open:
            return ()
        if not self._has_api_token and caller.credential is None:
            raise Forbidden(f"{declared.name} is not available: PUBLIC=on makes this service read-only")
        scope: Scope = "operate" if declared.operates else "trade" if declared.changes else "read"
        require_operator(caller, scope, declared.name)
        return ()

    async def _output(self, declared: Procedure, request: Any, keys: tuple[Credential, ...]) -> bytes:
        """Return the encoded output, which matches its schema.

        :raises Exception: it does not match
        """
        output = await declared.handler(self._context, request, *keys)
        if isinstance(output, LongOutput):
            await output.check(declared.output_decoder)
            return output.encode()
        return encoded(output, declared.output_decoder)

    async def _call_item(self, request: web.Request, item: batch.Item, caller: Caller, request_id: str) -> Answer:
        """Answer one call of a batch, in the style of the oRPC client, which sends batches, whatever the path."""
        started_s = time.perf_counter()
        target = self._targets.get(item.path)
        if target is None:
            answer = _NOT_FOUND
        elif item.method != "POST":
            answer = _method_not_supported(item.method, BodyStyle.ORPC)
        else:
            enveloped = self._enveloped[target.procedure.name]
            answer = await self._call_as(request, enveloped, item, caller, request_id)
            self.large_answers.note(target.procedure.name, len(answer.body))
        name, changes = (target.procedure.name, target.procedure.changes) if target else (UNKNOWN, False)
        request.app[REQUESTS].finished(name, answer.status, started_s, request_id, changes=changes)
        return answer

    async def _call_as(
        self, request: web.Request, target: Target, item: batch.Item, caller: Caller, request_id: str
    ) -> Answer:
        """Answer one call of a batch, with the credentials of its own header if it has one."""
        access = request.app[ACCESS]
        try:
            if item.authorization is not None:
                caller = await access.identify(item.authorization, address_of(request))
            access.admit(caller)
            self._check_reading(target.procedure, access, caller)
            return await self.cached_or_call(target, item.body, caller, request_id)
        except ANSWERED as error:
            return _error_answer(error, target.style)


def _method_not_supported(method: str, style: BodyStyle) -> Answer:
    answer = _failure(style, NOT_SUPPORTED, f"{method[:20]} is not supported here; use POST")
    return replace(answer, headers={"Allow": "POST"})


def refuse(request: web.Request, error: TraderError) -> web.Response:
    """Return the response for an error of `ANSWERED` raised outside a call, in the style of the path."""
    if request.path.startswith(PREFIX):
        return _response(_error_answer(error, request.app[DISPATCHER].style_of(request)))
    return refusal(_status_of(error)[0], str(error), _headers_of(error))


def _error_answer(error: TraderError, style: BodyStyle) -> Answer:
    issues = error.issues if isinstance(error, InvalidInput) else ()
    message = "; ".join(issue.sentence for issue in issues) if issues else str(error)
    return replace(_failure(style, _status_of(error), message, issues), headers=_headers_of(error))


def _headers_of(error: TraderError) -> Mapping[str, str]:
    if isinstance(error, Unavailable | TooManyRequests):
        return {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, MarketUnavailable):
        return {"Retry-After": "1"}
    if isinstance(error, ReadingClosed):
        basic = 'Basic realm="trader", charset="UTF-8"'
        return CIMultiDict([("WWW-Authenticate", basic), ("WWW-Authenticate", "Bearer")])  # browsers need two lines
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}


def _status_of(error: TraderError) -> tuple[HTTPStatus, str]:
    """Return the status and the code of an error, or of its nearest base class that has one."""
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), INTERNAL)


def _response(answer: Answer) -> web.Response:
    response = web.Response(status=answer.status, body=answer.body, content_type=JSON)
    if answer.headers:
        response.headers.update(answer.headers)
    return response


def _failure(style: BodyStyle, kind: tuple[HTTPStatus, str], message: str, issues: tuple[Issue, ...] = ()) -> Answer:
    status, code = kind
    return Answer(status, envelope.failure(style, status, code, message, issues))


def make_dispatcher(context: Context, registry: Registry | None = None) -> Dispatcher:
    """Return the dispatcher of the procedures of a registry, or of every procedure of `api/procedures`."""
    if registry is None:
        load_procedures()
        registry = REGISTRY
    return Dispatcher(registry, context)


DISPATCHER: Final = web.AppKey("dispatcher", Dispatcher)
