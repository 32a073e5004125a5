"""What is refused beyond a limit, with the words that say so: n is accepted, and n + 1 is not."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, Final, cast

import msgspec
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from support.chat_server import TURN
from support.feed import START
from support.venue_answers import answering, lighter_records

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.strategy import SeriesValue, Strategy
from trader.agents.domain.tools import Decision, Holding
from trader.agents.domain.view import ObservedAccount, ObservedMarket, ObservedStats, Shown, View
from trader.agents.models_file import read_models
from trader.agents.providers.cassette import Cassette
from trader.agents.providers.provider import Provider
from trader.agents.providers.strategy_process import Begun, command
from trader.agents.strategy_files import load_strategy
from trader.api.connections import raise_file_limit
from trader.api.schemas.analytics import GetFailuresInput
from trader.api.schemas.operations import HaltInput
from trader.api.schemas.positions import GetCryptoPricesInput
from trader.backtest.answers import KeptAnswers, Spending
from trader.backtest.sources import RecordedInvocation, RecordedStep
from trader.backtest.sweep import grid_of
from trader.commands.compare import compare_folders
from trader.core.errors import ProviderError, TraderError
from trader.core.inputs import decode_input
from trader.core.money import ZERO, require_figure
from trader.database.embedded import dumps
from trader.database.embedded.dumps import ROWS, DumpEntry, DumpRows
from trader.exam.folder import ExamPlan
from trader.live.budget import Priority, RequestBudget, spending_as
from trader.live.http import VenueHttp
from trader.live.hyperliquid.api import HyperliquidApi
from trader.live.hyperliquid.records import HyperliquidRecords
from trader.market.sources.downloads import Downloader
from trader.market.sources.files import dated_lines, read_file, read_funding
from trader.market.sources.recorder import read_lines
from trader.portfolio.tables import COLUMNS, load_table

Act = Callable[[int, pytest.MonkeyPatch, Path], object | Coroutine[Any, Any, object]]
MS: Final = timedelta(milliseconds=1)
D = Decimal


def takes(input_type: type[msgspec.Struct], value: object) -> object:
    """Decode an input as a procedure does."""
    return decode_input(msgspec.json.Decoder(input_type), input_type, msgspec.json.encode(value))


# --- agents -----------------------------------------------------------------------------------------------------------


def reads_prompt(size: int, _: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "own.md").write_text("x" * size)
    row = 'id = "own"\nvariant = "Apex"\nprovider = "openai"\nrouter_model = "m"\nprompt = "own.md"\n'
    (folder / "models.toml").write_text(f"[[models]]\n{row}")
    read_models(folder / "models.toml", None)


def view() -> View:
    amounts = dict.fromkeys(ObservedAccount.__struct_fields__, ZERO)
    prices: dict[str, Any] = dict.fromkeys(
        ("price", "bid", "ask", "spread", "funding_rate", "tick", "lot", "min_notional"), D(1)
    )
    market = ObservedMarket(symbol="BTC", quoted_at=START, stale=False, leverage_max=5, **prices)
    account = ObservedAccount(**amounts)
    return View(at=START, account=account, positions=(), trades=(), stats=ObservedStats(), markets={"BTC": market})


class Talkative(Strategy):
    """A strategy that returns as many decisions, and as long a name, as it is told."""

    def __init__(self, decisions: int = 0, name: int = 0) -> None:
        self.decisions, self.length = decisions, name

    def decide(self, view: View) -> Sequence[Decision]:
        return [Holding(reason="wait")] * self.decisions

    def series(self, view: View) -> Sequence[SeriesValue]:
        return [SeriesValue("BTC", "x" * self.length, 1.0)]


def has_deadline(seconds: int, *_: object) -> None:
    load_strategy(type("Slow", (Talkative,), {"deadline_s": seconds}), {})


def has_files(number: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr("trader.agents.providers.strategy_process.FILES_MAX", 3)
    for each in range(number):
        (folder / f"file{each}.py").touch()
    command(f"{folder / 'file0.py'}:Own")


# --- backtests and exams ----------------------------------------------------------------------------------------------


def lasts(ms: int, *_: object) -> None:
    RecordedInvocation("ada", START, [RecordedStep(START + ms * MS, START, [])]).check()


def compares(hours: int, _: pytest.MonkeyPatch, folder: Path) -> None:
    for name in ("one", "other"):
        accounts = [{"id": name, "provider": "rules", "hourlyReturns": [0] * hours}]
        result: dict[str, object] = {
            "accounts": accounts,
            "options": {},
            "strategy": None,
            "seed": None,
            "from": "2025-01-01T00:00:00Z",
        }
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "result.json").write_text(json.dumps(result))
    compare_folders([folder / "one", folder / "other"])


def plans(states: int = 1, samples: int = 1) -> None:
    model = {"id": "m", "name": "M", "variant": "Apex", "provider": "fake", "router_model_name": "m"}
    plan = {
        "secretDigest": "", "states": [{"number": 1}] * states, "edges": ["drain"], "kind": "planted", "horizon": "1h",
        "models": [model | {"created_at": "2025-01-01T00:00:00Z"}],
        "strategies": {}, "settings": {}, "code": {"version": "", "digest": ""}, "samples": samples,
    }  # fmt: skip
    msgspec.json.decode(json.dumps(plan), type=ExamPlan)


# --- markets and tables -----------------------------------------------------------------------------------------------


def reads_rate(hundred_millionths: int, _: pytest.MonkeyPatch, folder: Path) -> None:
    row = f"1735689600000,8,{D(hundred_millionths) / 10**8:.8f}\n"
    (folder / "rates.csv").write_text(f"calc_time,funding_interval_hours,last_funding_rate\n{row}")
    read_funding([folder / "rates.csv"])


def reads_text(text: str, folder: Path) -> None:
    (folder / "candles.csv").write_text(text)
    list(dated_lines(folder / "candles.csv"))


def reads_candles(number: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr("trader.market.sources.files.CANDLES_MAX", 3)
    rows = (f"{1_735_689_600_000 + 60_000 * minute},9,9,9,9,1\n" for minute in range(number))
    (folder / "candles.csv").write_text("".join(rows))
    read_file(folder / "candles.csv")


def reads_recording(number: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr("trader.market.sources.recorder.LINES_MAX", 3)
    file = folder / "2025-01-01T00.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"at":"2025-01-01T00:00:00Z"}\n' * number))
    list(read_lines(file))


def reads_table(size: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr("trader.portfolio.tables.FILE_BYTES_MAX", 1000)
    head, row = ",".join(COLUMNS["equity"]) + "\n", "2025-01-01T00:00:00.000Z,{},1,1,0\n"
    (folder / "equity.csv").write_text(head + row.format("x" * (size - len(head) - len(row) + 2)))
    assert (folder / "equity.csv").stat().st_size == size
    load_table(folder, "equity")


# --- venues -----------------------------------------------------------------------------------------------------------


def spends(priority: Priority, number: int) -> None:
    budget = RequestBudget(60, per_kind=60)
    budget.allow("account", 30)
    with spending_as(priority):
        budget.spend("account", number)


async def answers(size: int, patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr("trader.live.http.ANSWER_BYTES_MAX", 1000)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * size)

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server:
        http = VenueHttp(str(server.make_url("")).rstrip("/"), RequestBudget(60, per_kind=60), pause_s=0.0)
        try:
            await http.ask("GET", "/")
        finally:
            await http.close()


async def lists_decimals(decimals: int, patch: pytest.MonkeyPatch, _: Path) -> None:
    api = HyperliquidApi("http://there")
    answering(patch, api, lambda: {"universe": [{"name": "BTC", "szDecimals": decimals, "maxLeverage": 5}]})
    await api.listings()


async def charges(ten_thousandths: int, patch: pytest.MonkeyPatch, _: Path) -> None:
    api, rate = HyperliquidApi("http://there"), str(D(ten_thousandths) / 10_000)
    fees = {"userCrossRate": rate, "userAddRate": "0", "nRequestsUsed": 0, "nRequestsCap": 9}
    answering(patch, api, lambda: fees)
    await HyperliquidRecords(api, "0x").fee_rates()


async def charges_ticks(ticks: int, patch: pytest.MonkeyPatch, _: Path) -> None:
    limits = {"current_taker_fee_tick": ticks, "current_maker_fee_tick": 0, "user_tier": "standard"}
    await lighter_records(patch, lambda: limits).fee_rates()


async def shows_pages(number: int, patch: pytest.MonkeyPatch, _: Path) -> None:
    pages = count(1)
    await lighter_records(
        patch, lambda: {"trades": [], "next_cursor": "more" if next(pages) < number else None}
    ).fills_since(START)


# --- backtests, backups and downloads ---------------------------------------------------------------------------------


class AwayProvider:
    """A provider that fails so often before it answers, and needs a wait of so many milliseconds."""

    name = "away"

    def __init__(self, failures: int = 0, needs_ms: int = 0) -> None:
        self.failures, self.needs_ms = failures, needs_ms

    async def answer(self, turn: Turn) -> ModelAnswer:
        self.failures -= 1
        if self.failures >= 0 or turn.wait_max_s < self.needs_ms / 1000:
            raise ProviderError("away")
        return ModelAnswer(text="", calls=(), message={}, model="m", cost_usd=ZERO)


async def nothing(*_: object) -> None: ...


async def asks(provider: AwayProvider) -> None:
    cassette = SimpleNamespace(get=lambda _: None, keep_context=lambda *_: None, add=nothing)
    kept = KeptAnswers("p", cast("Cassette", cassette), Spending(D(1)), cast("Provider", provider), 1, nothing)
    await kept.answer(TURN)


def dump_of(*chunks: bytes) -> DumpRows:
    """Return the rows of a dump of one table, which arrive in these parts."""
    left = iter(chunks)

    async def read(_: int) -> bytes:
        return next(left, b"")

    return DumpRows(cast("asyncio.StreamReader", SimpleNamespace(read=read)), [ENTRY])


ENTRY: Final = DumpEntry("", ROWS, "public", "notes")
HEAD: Final = b"COPY public.notes (text) FROM stdin;\n"
END: Final = b"\n\\.\n"


async def restores_row(size: int, patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(dumps, "ROW_BYTES_MAX", 1000)
    rows = dump_of(HEAD + b"x" * size, END)
    async for _name, _columns in rows.tables():
        assert [row async for row in rows.rows()] == [b"x" * size + b"\n"]


async def restores_table(size: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    async def entries(_: Path) -> list[DumpEntry]:
        return [ENTRY]

    @asynccontextmanager
    async def reading(*_: object) -> AsyncIterator[DumpRows]:
        yield dump_of(HEAD + b"x" * (size - 1) + END)

    patch.setattr(dumps, "SMALL_BYTES_MAX", 1000)
    patch.setattr(dumps, "list_entries", entries)
    patch.setattr(dumps, "reading", reading)
    await dumps.read_rows(folder, "notes")


class Received(Exception):
    """A file was received to its end; nothing more is to be done with it."""


async def downloads(folder: Path, *, size: int = 10, checksum_size: int = 100) -> None:
    """Download a checksum, and the last bytes of a file of zeros, all others of which an earlier call received."""
    app, place = web.Application(), folder / f"{size} {checksum_size}"
    place.mkdir()
    with (place / "file.zip.part").open("wb") as part:
        part.truncate(size - 5)

    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith(".CHECKSUM"):
            return web.Response(body=f"{'0' * 64}  file.zip".ljust(checksum_size).encode())
        return web.Response(status=206, body=bytes(5))

    def show(_: str, received: int, whole: int) -> None:
        if received == whole == size:
            raise Received

    app.router.add_get("/{name}", answer)
    async with TestServer(app) as server, ClientSession() as http:
        with suppress(Received):
            await Downloader(place, str(server.make_url("")), show).fetch(http, PurePosixPath("file.zip"))


def has_open_files(missing: int, patch: pytest.MonkeyPatch, _: Path) -> None:
    """Start where the system allows so many files less than 256 and those of 16 connections."""
    allowed = 256 + 16 - missing
    limits = SimpleNamespace(RLIMIT_NOFILE=7, RLIM_INFINITY=-1, getrlimit=lambda _: (allowed, allowed))
    patch.setattr("trader.api.connections.resource", limits)
    assert raise_file_limit(1000) == 16


LIMITS: Final[dict[str, tuple[int, Act, str]]] = {
    "core: digits of an amount": (30, lambda n, *_: require_figure(D(10) ** n), "expected an amount"),
    "api: rows that a page skips": (
        1_000_000,
        lambda n, *_: takes(GetFailuresInput, {"skip": n}),
        "expected a whole number from 0 up to 1e+06, got 1000001",
    ),
    "api: markets of a request": (
        100,
        lambda n, *_: takes(GetCryptoPricesInput, {"symbols": ["BTC"] * n}),
        "a list of at most 100",
    ),
    "exchange: characters of a reason": (
        500,
        lambda n, *_: takes(HaltInput, {"reason": "x" * n}),
        "expected text of 1 to 500 characters",
    ),
    "agents: characters of a prompt": (40_000, reads_prompt, "of 1 to 40000 characters; 'own.md' has more"),
    "agents: candles that a strategy sees": (1000, lambda n, *_: Begun(Shown(("1h",), n)), "it asks for"),
    "agents: fills that a strategy sees": (200, lambda n, *_: Begun(Shown(("1h",), fills=n)), "it asks for"),
    "agents: decisions of a strategy": (
        100,
        lambda n, *_: load_strategy(Talkative, {"decisions": n}).decide(view()),
        "more than 100 of them in one cycle",
    ),
    "agents: characters of a series' name": (
        40,
        lambda n, *_: load_strategy(Talkative, {"name": n}).series(view()),
        "expected 1 to 40 characters",
    ),
    "agents: seconds of a strategy's deadline": (600, has_deadline, "at most 600 seconds"),
    "agents: files beside a strategy": (3, has_files, "has more than 3 Python files"),
    "backtest: time of a step": (86_400_000, lasts, "of an invocation that began at"),
    "backtest: values of a range": (10_000, lambda n, *_: grid_of([f"window=1..{n}"]), "a range must be FIRST..LAST"),
    "commands: hours that are compared": (500_000, compares, "length <= 500000"),
    "exam: states": (100_000, lambda n, *_: plans(states=n), "length <= 100000"),
    "exam: samples of a state": (10_000, lambda n, *_: plans(samples=n), "<= 10000"),
    "market: rate of an hour": (10_000_000, reads_rate, "is beyond ±0.1"),
    "market: characters of a line": (
        65_536,
        lambda n, _, folder: reads_text("x" * (n - 1) + "\n", folder),
        "has over 65536 characters",
    ),
    "market: blank lines at the end": (
        1000,
        lambda n, _, folder: reads_text("line\n" + "\n" * n, folder),
        "an empty line",
    ),
    "market: candles of a file": (3, reads_candles, "more than 3 candles"),
    "market: lines of an hour": (3, reads_recording, "has more than 3 lines, too many for an hour"),
    "portfolio: bytes of a table": (1000, reads_table, "cannot be read"),
    "live: transactions that opening leaves": (10, lambda n, *_: spends(Priority.OPEN, n), "are kept for closing"),
    "live: transactions that protection leaves": (25, lambda n, *_: spends(Priority.PROTECT, n), "kept for closing"),
    "live: bytes of an answer": (1000, answers, "the venue's answer is too long"),
    "live: decimals of a size": (6, lists_decimals, "rules of BTC are impossible"),
    "live: fee of Hyperliquid": (100, charges, "userFees: cannot be decoded"),
    "live: fee of Lighter": (10_000, charges_ticks, "accountLimits: cannot be decoded"),
    "live: pages of Lighter": (20, shows_pages, "trades: more than 2000 rows"),
    "backtest: failed requests for an answer": (2, lambda n, *_: asks(AwayProvider(n)), "m cannot be asked: away"),
    "backtest: how long keys are awaited": (
        600_000,
        lambda n, *_: asks(AwayProvider(0, n)),
        "m cannot be asked: away",
    ),
    "database: bytes of a row of a backup": (1000, restores_row, "a row of over 1,000 bytes"),
    "database: bytes of a table that is read whole": (1000, restores_table, "more than 1,000 bytes in the table notes"),
    "market: bytes of a checksum": (
        4096,
        lambda n, _, folder: downloads(folder, checksum_size=n),
        "file.zip.CHECKSUM has over 4,096 bytes",
    ),
    "market: bytes of a published file": (
        1 << 30,
        lambda n, _, folder: downloads(folder, size=n),
        "file.zip has over 1,073,741,824 bytes",
    ),
    "api: files that a system lacks": (0, has_open_files, "the service needs at least 272"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
async def test_one_more_than_a_limit_allows_is_refused_in_words(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    most, act, words = LIMITS[name]
    accepted = act(most, monkeypatch, tmp_path)
    if isinstance(accepted, Awaitable):
        await accepted
    with pytest.raises((TraderError, ValueError)) as refused:
        outcome = act(most + 1, monkeypatch, tmp_path)
        if isinstance(outcome, Awaitable):
            await outcome
    assert words in str(refused.value)
