"""A service with a few demonstration procedures, so that dispatch is tested independently of the real ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pytest
from aiohttp import web
from pytest_aiohttp.plugin import AiohttpClient
from support.served import AppClient, Client, make_app, served

from trader.api.registry import Registry
from trader.api.routes import Route
from trader.api.schemas.common import Empty, Input, LongOutput, Number, Wire
from trader.core.errors import (
    InvalidInput,
    Issue,
    LedgerViolated,
    MarketUnavailable,
    NotFound,
    OrderUndecided,
    Precondition,
    ProviderError,
    StartError,
    Unavailable,
)
from trader.settings.settings import Settings

ServiceFactory = Callable[..., Awaitable[AppClient]]


@dataclass
class DemoContext:
    """The context of the demonstration procedures, and a record of their effects."""

    settings: Settings
    calls: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    version: int = 0


class Inner(Input, kw_only=True):
    stop: Number | None = None


class EchoInput(Input, kw_only=True):
    window: Literal["24h", "7d"] = "7d"
    text: str | None = None
    number: Annotated[int, msgspec.Meta(ge=1, le=10)] | None = None
    items: list[str] = []
    inner: Inner | None = None


class EchoOutput(Wire, kw_only=True):
    window: str
    text: str | None
    items: list[str]
    max_value: Decimal = Decimal("1.50")


class RaiseInput(Input, kw_only=True):
    error: str


class Figure(Wire, kw_only=True):
    value: float


class Figures(Wire, kw_only=True):
    figures: list[Figure]
    text: str


ERRORS: dict[str, Exception] = {
    "input": InvalidInput(Issue(("symbol",), "no such market: DOGE")),
    "not found": NotFound("no order 7"),
    "precondition": Precondition("needs TRADING_MODE=simulated"),
    "unavailable": Unavailable("the database cannot be reached", 7),
    "market": MarketUnavailable("no price for BTC"),
    "undecided": OrderUndecided("the order is not decided yet"),
    "provider": ProviderError("secret detail"),
    "books": LedgerViolated("secret detail"),
    "start": StartError("secret detail"),
    "bug": RuntimeError("secret detail"),
    "recursion": RecursionError("secret detail"),
}

registry = Registry()


@registry.procedure("demo.echo")
async def echo(context: DemoContext, request: EchoInput) -> EchoOutput:
    context.calls.append("demo.echo")
    return EchoOutput(window=request.window, text=request.text, items=request.items)


@registry.procedure("demo.long", token=lambda context: context.version)
async def list_long(context: DemoContext, request: EchoInput) -> LongOutput[Figures]:
    """As many figures as requested, in chunks of a hundred, followed by `items` unchanged."""
    context.calls.append("demo.long")
    records = [b'{"value":%d}' % number for number in range(int(request.text or 0))]
    records += [item.encode() for item in request.items]
    chunks = [b",".join(records[start : start + 100]) for start in range(0, len(records), 100)]
    return LongOutput(Figures(figures=[], text="x"), msgspec.json.Decoder(list[Figure]), chunks)


@registry.procedure("demo.raise")
async def raise_error(context: DemoContext, request: RaiseInput) -> Figure:
    raise ERRORS[request.error]


@registry.procedure("demo.list")
async def list_figures(context: DemoContext, request: Empty) -> list[Figure]:
    return [Figure(value=1.5)]


@registry.procedure("demo.notANumber")
async def not_a_number(context: DemoContext, request: Empty) -> Figure:
    context.calls.append("demo.notANumber")
    return Figure(value=1.5 if len(context.calls) == 1 else float("nan"))


@registry.procedure("demo.wrong")
async def wrong(context: DemoContext, request: Empty) -> Figure:
    context.calls.append("demo.wrong")
    untyped: Any = 1.5 if len(context.calls) == 1 else "text"
    return Figure(value=untyped)


@registry.procedure("demo.static", token=lambda _: ())
async def static(context: DemoContext, request: Empty) -> Figure:
    context.calls.append("demo.static")
    return Figure(value=1)


@registry.procedure("demo.change", changes=True)
async def change(context: DemoContext, request: Empty) -> Figure:
    context.calls.append("demo.change")
    return Figure(value=2)


@registry.procedure("simulator.demo", paper_only=True)
async def simulate(context: DemoContext, request: Empty) -> Figure:
    return Figure(value=3)


@registry.procedure("demo.wait")
async def wait(context: DemoContext, request: Empty) -> Figure:
    """Ends only after another call has opened the gate."""
    context.waiting += 1
    await asyncio.wait_for(context.gate.wait(), 10)
    context.calls.append("demo.wait")
    return Figure(value=4)


@registry.procedure("demo.open")
async def open_gate(context: DemoContext, request: Empty) -> Figure:
    context.gate.set()
    return Figure(value=5)


def load_settings(*, demo: bool = True, **environment: str) -> Settings:
    return Settings.load(environment, None, demo=demo)


def build_app(context: DemoContext) -> web.Application:
    async def plain(_: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    paths = ("/health", "/api/events/positions", "/elsewhere", "/figures")
    routes = [route for path in paths for route in Route(path).get(plain)]
    return make_app(routes, context=context, registry=registry, settings=context.settings)


@pytest.fixture
async def make_service(aiohttp_client: AiohttpClient) -> ServiceFactory:
    """Start a service whose settings are given as environment variables."""

    async def make(*, demo: bool = True, **environment: str) -> AppClient:
        return await aiohttp_client(build_app(DemoContext(load_settings(demo=demo, **environment))))

    return make


@pytest.fixture
async def context() -> DemoContext:
    return DemoContext(load_settings())


@pytest.fixture
async def client(context: DemoContext, aiohttp_client: AiohttpClient) -> AppClient:
    return await aiohttp_client(build_app(context))


@pytest.fixture
async def limited_client(context: DemoContext) -> AsyncIterator[Client]:
    """The same procedures on the service's own connections."""
    async with served(build_app(context)) as started:
        yield started


@pytest.fixture
def registered() -> Registry:
    return registry
