"""OpenAPI 3.1 document of the service, derived from its structs, procedures, routes and error table.

It is served at `GET /api/openapi.json`, beside the reference page that shows it, its types in TypeScript (a file that
`scripts/make_contract` writes) and the skill. The first request for one of them makes all, in a thread: a third of a
second that a start need not take.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from http import HTTPStatus
from importlib import resources
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web

from trader import __version__
from trader.api import batch, broadcast, health, metrics, record, rpc, streams
from trader.api.dashboard import assets
from trader.api.json_schema import REFERENCE, Schema, components_of
from trader.api.registry import REGISTRY, Procedure, Registry, load_procedures
from trader.api.requests import BODY_SIZE_MAX, BodyTimeout, Handler
from trader.api.routes import JSON, Route, base_url
from trader.api.schemas.common import ErrorBody
from trader.core import errors
from trader.settings.settings import Settings

DOCUMENT: Final = Route("/api/openapi.json", head=True)
PAGE: Final = Route("/api/docs", head=True)
CONTRACT: Final = Route("/api/contract.d.ts", head=True)
SKILL: Final = Route("/skill.md", head=True)

EXAMPLES: Final[Mapping[str, dict[str, Any]]] = {
    "models.getConversation": {"invocationId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52"},
    "agent.placeOrder": {
        "viewId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52",
        "clientOrderId": "1",
        "symbol": "BTC",
        "side": "buy",
        "quantity": 0.01,
        "exitPlan": {"stop": 40000},
    },
    "agent.closePosition": {"viewId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52", "symbol": "BTC"},
    "agent.setExitPlan": {"viewId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52", "symbol": "BTC", "stop": 45000},
    "agent.hold": {"viewId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52", "reason": "no squeeze has released"},
    "agent.note": {"viewId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52", "text": "BTC squeezes since 14:00"},
    "agent.cancelOrder": {"orderId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52"},
    "agent.getCandles": {"symbol": "BTC", "interval": "15m"},
    "agent.getOrderBook": {"symbol": "BTC"},
    "simulator.placeOrder": {"symbol": "BTC", "side": "buy", "quantity": 0.01, "leverage": 3},
    "simulator.cancelOrder": {"orderId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52"},
    "trading.getCryptoPrices": {"symbols": ["BTC", "ETH"]},
    "variants.getVariantHistory": {"window": "24h"},
    "analytics.getLeaderboard": {"window": "30d", "sortBy": "maxDrawdown"},
    "operations.halt": {"reason": "strange prices"},
    "operations.approve": {"name": "apex-rules"},
    "operations.flatten": {"reason": "strange prices"},
}
"""Example inputs, where `{}` is uninformative or insufficient."""

_DOMAINS: Final = {
    "trading": "Positions, completed trades, prices and equity over time.",
    "models": "The models, and the record of each run.",
    "agent": "Views and decisions of external agents, each with its key.",
    "simulator": "Orders and accounts of the paper exchange.",
    "analytics": "Statistics, leaderboard and failures of the models.",
    "operations": "The halt of an operator, its end, and what operators look at.",
    "variants": "The strategy variants, and the performance of their models.",
    "streams": "Live state as Server-Sent Events.",
    "record": "The record, for verifiers.",
    "health": "Health reports, for monitoring.",
}

_RAISES: Final = re.compile(r"^:raises (\w+): (.+)$", re.MULTILINE)

_OF_EVERY_CALL: Final = (
    errors.InvalidInput,
    errors.Forbidden,
    errors.PayloadTooLarge,
    errors.Unavailable,
    BodyTimeout,
)
"""The errors that every call may return."""

_OF_KEYS: Final = (
    errors.Unauthorized,
    errors.KeyRevoked,
    errors.Forbidden,
    errors.MissingScope,
    errors.ForeignAccount,
    errors.TooManyRequests,
)
"""The errors of calls that need an agent's key."""


def make_document(registry: Registry, settings: Settings) -> dict[str, Any]:
    """Return the OpenAPI document of these procedures, with the streams and health."""
    procedures = registry.procedures.values()
    routes = [streams.ONE_STREAM, *streams.ROUTES.values(), health.HEALTH, health.REPORT, record.RECORD]
    if settings.metrics == "on":
        routes.append(metrics.METRICS)
    types = [ErrorBody, *(response.body for route in routes for response in route.responses.values())]
    types += [route.event_data for route in routes if route.event_data is not None]
    types += [kind for declared in procedures for kind in (declared.input_type, declared.output_type)]
    schemas, components = components_of(types)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {
        rpc.PREFIX + declared.name: {"post": _operation(declared, schema_of, components, settings)}
        for declared in procedures
    }
    for route in routes:
        paths |= {path: {"get": _read_operation(route, path, schema_of)} for path in route.paths}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "trader",
            "version": __version__,
            "summary": "Strategy variant trading service",
            "description": _introduction(settings),
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": base_url(settings) or "/"}],
        "tags": [{"name": name, "description": text} for name, text in _DOMAINS.items()],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": _failures(),
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "API_TOKEN if set, an operator's token, or an agent's key.",
                }
            },
        },
    }


_HEADERS: Final = {
    "X-Request-Id": {
        "description": "Identifies this request, also in the log.",
        "required": True,
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds to wait before retrying.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}},
    "Cache-Control": {"schema": {"type": "string"}},
}


def _operation(
    declared: Procedure, schema_of: Mapping[Any, Schema], components: Mapping[str, Schema], settings: Settings
) -> dict[str, Any]:
    given, answered = schema_of[declared.input_type], schema_of[declared.output_type]
    text = inspect.getdoc(declared.handler) or declared.name
    raised = dict(_RAISES.findall(text))
    summary, _, description = _RAISES.sub("", text).strip().partition("\n\n")
    fields = components[given["$ref"].removeprefix(REFERENCE)]
    media: dict[str, Any] = {"schema": given}
    if declared.name in EXAMPLES:
        media["example"] = EXAMPLES[declared.name]
    operation: dict[str, Any] = {
        "operationId": declared.name,
        "tags": [declared.name.partition(".")[0]],
        "summary": " ".join(summary.split()),
        "requestBody": {"required": bool(fields.get("required")), "content": {JSON: media}},
        "responses": {
            "200": {
                "description": "The output.",
                "headers": _headers("X-Request-Id"),
                "content": {JSON: {"schema": answered}},
            },
            **_references(declared, raised),
        },
        "x-orpc-path": rpc.PREFIX + declared.name.replace(".", "/"),
    }
    if description:
        operation["description"] = description.strip()
    if declared.changes:
        must: list[dict[str, Any]] = [] if settings.api_token is not None else [{}]
        operation["security"] = [*must, {"bearer": []}]
    if declared.scope is not None:
        operation["security"] = [{"bearer": []}]
    return operation


def _references(declared: Procedure, raised: Mapping[str, str]) -> dict[str, Any]:
    """Return references to the errors of the procedure, by status."""
    kinds: list[type[errors.TraderError]] = list(_OF_EVERY_CALL)
    if declared.changes or declared.private:
        kinds += (errors.Unauthorized, errors.KeyRevoked, errors.MissingScope)
    if declared.scope is not None:
        kinds += _OF_KEYS
    if declared.paper_only:
        kinds.append(errors.Precondition)
    kinds += [getattr(errors, name) for name in raised]
    pairs = dict.fromkeys([*(rpc.STATUSES[kind] for kind in kinds), rpc.INTERNAL])
    codes: dict[HTTPStatus, list[str]] = {}
    for status, code in pairs:
        codes.setdefault(status, []).append(code)
    references: dict[str, Any] = {
        str(int(status)): {"$ref": f"#/components/responses/{names[0]}"} if len(names) == 1 else _failure(status, names)
        for status, names in codes.items()
    }
    for name, text in raised.items():
        status, code = rpc.STATUSES[getattr(errors, name)]
        if len(codes[status]) == 1:
            references[str(int(status))] = {"$ref": f"#/components/responses/{code}", "description": text}
    return dict(sorted(references.items()))


def _meanings() -> dict[tuple[HTTPStatus, str], str]:
    """Return the meaning of each status and code, from the docstrings of the errors."""
    meanings: dict[tuple[HTTPStatus, str], str] = {}
    for kind, pair in rpc.STATUSES.items():
        sentence = (kind.__doc__ or "").partition("\n\n")[0].strip()
        meanings[pair] = f"{meanings[pair]} {sentence}" if pair in meanings else sentence
    meanings[rpc.NOT_SUPPORTED] = "The path does not support this method; `Allow` lists the supported ones."
    meanings[rpc.INTERNAL] = "The service failed. The log shows the cause under the request's id."
    return dict(sorted(meanings.items()))


def _failures() -> dict[str, Any]:
    return {code: _failure(status, [code]) for status, code in _meanings()}


_EXTRA_HEADERS: Final = {
    HTTPStatus.SERVICE_UNAVAILABLE: "Retry-After",
    HTTPStatus.TOO_MANY_REQUESTS: "Retry-After",
    HTTPStatus.UNAUTHORIZED: "WWW-Authenticate",
}


def _failure(status: HTTPStatus, codes: Sequence[str]) -> dict[str, Any]:
    """Return the response of a status whose body has one of these codes."""
    meanings = _meanings()
    must = ["issues"] if "VALIDATION_ERROR" in codes else []
    code_schema = {"const": codes[0]} if len(codes) == 1 else {"enum": list(codes)}
    return {
        "description": " ".join(meanings[status, code] for code in codes),
        "headers": _headers("X-Request-Id", *([_EXTRA_HEADERS[status]] if status in _EXTRA_HEADERS else [])),
        "content": {
            JSON: {
                "schema": {
                    "allOf": [{"$ref": f"{REFERENCE}ErrorBody"}],
                    "properties": {"code": code_schema},
                    **({"required": must} if must else {}),
                }
            }
        },
    }


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _read_operation(route: Route, path: str, schema_of: Mapping[Any, Schema]) -> dict[str, Any]:
    operation_id = route.name if path == route.path else path.strip("/")
    operation: dict[str, Any] = {
        "operationId": operation_id.replace("/", "."),
        "tags": [route.tag],
        "summary": route.summary,
        "responses": {
            str(status): {
                "description": response.description,
                **({"headers": _headers(*response.headers)} if response.headers else {}),
                "content": {response.media_type: {"schema": schema_of[response.body]}},
            }
            for status, response in route.responses.items()
        },
    }
    if route.description:
        operation["description"] = route.description
    if route.parameters:
        operation["parameters"] = [
            {"name": name, "in": "query", "description": text, "schema": route.forms.get(name, {"type": "string"})}
            for name, text in route.parameters.items()
        ]
    if route.event_data is not None:
        operation["x-event-data"] = schema_of[route.event_data]
    return operation


def _introduction(settings: Settings) -> str:
    rows = ["| status | code | meaning |", "|---|---|---|"]
    for (status, code), meaning in _meanings().items():
        rows.append(f"| {int(status)} | `{code}` | {' '.join(meaning.split())} |")
    figures = {
        "errors": "\n".join(rows),
        "server": base_url(settings),
        "body_bytes_max": f"{BODY_SIZE_MAX:,}",
        "batch_items_max": str(batch.ITEMS_MAX),
        "subscribers_max": str(broadcast.CAPACITY),
        "ping_s": f"{streams.Timing().ping_s:g}",
    }
    names = "|".join(f"{{{name}}}" for name in figures)
    return re.sub(names, lambda match: figures[match[0][1:-1]], _text("introduction.md"))


def _text(name: str) -> str:
    """Return a file of the reference."""
    return resources.files("trader.api.reference").joinpath(name).read_text(encoding="utf-8")


_Contents = Mapping[str, tuple[assets.Content, Mapping[str, str]]]


def routes(settings: Settings) -> list[web.RouteDef]:
    """Return the routes of the document, its page, the contract and the skill."""
    load_procedures()
    contents = cache(partial(_contents, settings))
    return [
        definition for route in (DOCUMENT, CONTRACT, SKILL, PAGE) for definition in route.get(_answer(contents, route))
    ]


def _contents(settings: Settings) -> _Contents:
    """Return what each path answers, and its headers."""
    document = make_document(REGISTRY, settings)
    skill = _text("skill.md").replace("{server}", base_url(settings))
    page = assets.text_of("reference.html").format(folder=assets.FOLDER)
    contents: tuple[tuple[Route, bytes, str, Mapping[str, str]], ...] = (
        (DOCUMENT, msgspec.json.encode(document), JSON, {}),
        (CONTRACT, _text("contract.d.ts").encode(), "text/plain; charset=utf-8", {}),
        (SKILL, skill.encode(), "text/markdown; charset=utf-8", {}),
        (PAGE, page.encode(), "text/html; charset=utf-8", assets.PAGE_HEADERS),
    )
    return {
        route.path: (assets.Content.of(body, media_type), {hdrs.CACHE_CONTROL: "no-cache", **headers})
        for route, body, media_type, headers in contents
    }


def _answer(contents: Callable[[], _Contents], route: Route) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        content, headers = (await asyncio.to_thread(contents))[route.path]
        return content.respond(request, headers)

    return answer
