"""Execution of a spec: from its inputs to the files of its result, in a new folder."""

import asyncio
import gc
import itertools
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from trader import __version__
from trader.agents.domain.view import HISTORY_CANDLES
from trader.agents.strategy_files import LoadedStrategy, deadlines
from trader.agents.variants import VARIANTS
from trader.api.schemas.evidence import GetEvidenceOutput
from trader.backtest.accounts import DecisionSource
from trader.backtest.advance import Journal
from trader.backtest.answers import AskingEnded
from trader.backtest.chosen import Chosen
from trader.backtest.market import BacktestMarket
from trader.backtest.models import choose_models
from trader.backtest.output import DatabaseJournal, DecisionLines, LedgerLines, Output, Reserve, TableJournal
from trader.backtest.result import (
    account_value,
    answers_value,
    baselines_value,
    board,
    capacity_value,
    labelled,
    listings_value,
    masked_value,
    rank,
    statistics_of,
    statistics_of_baseline,
    strategy_value,
)
from trader.backtest.run import Backtest
from trader.backtest.sources import RecordingStrategySource
from trader.backtest.spec import (
    DECISIONS,
    RESULT,
    BacktestSource,
    BacktestSpec,
    Conditions,
    data_files,
    environ_of,
    open_source,
    read_own_data,
)
from trader.backtest.trials import add_trials, check_trials
from trader.core.clock import iso, moment_of
from trader.core.errors import SettingsError, StartError, StrategyError
from trader.core.files import file_digest
from trader.core.ownership import EMBEDDED_FOLDER
from trader.core.wire import encode
from trader.database.embedded.server import EmbeddedPostgres, database_name
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.market.domain.markets import Interval
from trader.market.sources.own_data import OwnData
from trader.portfolio.evidence import Field, last_whole_hour
from trader.portfolio.evidence import make_report as evidence_report
from trader.portfolio.tables import Format, Table, check_format
from trader.seasons.standings import RankedModel
from trader.settings.dotenv import DEFAULT_FILE, quoted
from trader.settings.settings import Settings

LEDGER, REPORT = "ledger.jsonl", "report.html"
"""The files of a backtest, in its folder, beside those of `spec`."""

_STATEMENT_TIMEOUT_S: Final = 120.0
_CRASHED: Final = ("strategy", "storage")
"""The causes of an end after which a run does not count as a trial."""


class BacktestListener:
    """Receives what people see of a running backtest, and ignores it."""

    def say(self, line: str) -> None:
        """Receive a line, such as where external agents call."""

    def show(self, reached: datetime, starts_at: datetime, ends_at: datetime) -> None:
        """Receive the time reached, about once per hour of market time."""


class Interrupts(list[int]):
    """The signals received so far; each one cancels `task`, and any of them ends a backtest early."""

    task: asyncio.Task[None] | None = None

    def interrupt(self, number: int, _: FrameType | None = None) -> None:
        """End the backtest soon. May be called in another thread, and as the handler of a signal."""
        self.append(number)
        task = self.task
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Record Ctrl+C and SIGTERM instead of raising KeyboardInterrupt, which could cut the ledger within a change.

        Only the main thread receives signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class End(NamedTuple):
    """The end of a backtest: the time reached, and the cause of an early end (None: it reached its end).

    It ends early if no model can be called anymore, a strategy fails, or the disk or the database refuses writes.
    """

    reached: datetime
    cause: Literal["budget", "provider", "missing", "storage", "strategy"] | None = None
    reason: str = ""


class FinishedBacktest(NamedTuple):
    """A finished backtest: its result as in `result.json`, the accounts by rank, its tables, and how it ended.

    `series` is what the strategy drew, `excursions` has those of each trade in its table, and `failure` is the error of
    the strategy that ended it.
    """

    value: dict[str, Any]
    standings: list[RankedModel]
    tables: TableJournal
    series: Table
    excursions: list[tuple[float, float]]
    end: End
    failure: StrategyError | None


class MarketOpener:
    """Opens the markets of backtests, and keeps the last one for the next backtest on the same conditions."""

    def __init__(self) -> None:
        self._opened: tuple[Conditions, Settings, BacktestSource] | None = None
        self._market: tuple[BacktestSource, set[Interval], int, BacktestMarket] | None = None
        self._prepared: BacktestMarket | None = None
        self._own_data = OwnData()

    async def source(self, conditions: Conditions, environ: Mapping[str, str]) -> tuple[Settings, BacktestSource]:
        """Return what `open_source` returns."""
        if self._opened is None or self._opened[0] != conditions:
            settings, source = await open_source(conditions, environ)
            self._own_data = read_own_data(conditions, source.span)
            self._opened = conditions, settings, source
        return self._opened[1:]

    async def market(self, source: BacktestSource, chosen: Chosen) -> BacktestMarket:
        """Return the market with the candles that models may read."""
        of_baselines = {each for model, _ in chosen.models for each in VARIANTS[model.variant].agent.intervals}
        history = max((strategy.shown.candles for strategy in chosen.strategies), default=HISTORY_CANDLES)
        needs = source, chosen.intervals | of_baselines, history
        if self._market is None or self._market[:3] != needs:
            self._market = *needs, await BacktestMarket.open(*needs)
            self._market[3].own_data = self._own_data
        return self._market[3]

    async def prepare(self, spec: BacktestSpec) -> None:
        """Open the market of a backtest, and compute what its strategies read of it. Raises like `execute`."""
        environ = environ_of(spec.conditions)
        settings, source = await self.source(spec.conditions, environ)
        async with AsyncExitStack() as stack:
            chosen = await _choose(spec, environ, settings, source, stack)
            market = await self.market(source, chosen)
        if market is self._prepared:
            return
        self._prepared = market
        market.prepare_indicators()
        for _, decides in chosen.models:
            if isinstance(decides.strategy, LoadedStrategy) and not decides.strategy.looks_first:
                market.prepare_views(decides.strategy.shown, _decision_seconds(decides, market.span))


async def execute(
    spec: BacktestSpec, listener: BacktestListener, interrupts: Interrupts, opener: MarketOpener | None = None
) -> FinishedBacktest:
    """Execute a backtest, and write its files. An interrupt ends it early, with the results so far.

    :raises SettingsError: the spec is wrong; without a budget for AI models, with an estimate of the cost
    :raises StartError: the folder exists, or something cannot be read or written
    """
    spec.check()
    check_format(spec.tables)
    if spec.out.exists():
        raise StartError(f"{spec.out} exists already; --out names a new folder.")
    try:
        return await _execute(spec, listener, interrupts, opener or MarketOpener())
    except OSError as error:
        raise StartError(f"{error.filename or spec.out} cannot be written: {error.strerror}.") from error


async def _execute(
    spec: BacktestSpec, listener: BacktestListener, interrupts: Interrupts, opener: MarketOpener
) -> FinishedBacktest:
    environ, out = environ_of(spec.conditions), spec.out
    check_trials(spec.trials)
    settings, source = await opener.source(spec.conditions, environ)
    async with AsyncExitStack() as files:
        async with AsyncExitStack() as stack:
            chosen = await _choose(spec, environ, settings, source, stack)
            for line in chosen.agent_lines:
                listener.say(line)
            market = await opener.market(source, chosen)
            _check_warm_up(chosen, market)
            out.mkdir(parents=True, exist_ok=False)
            unbegun = files.enter_context(ExitStack())
            unbegun.callback(shutil.rmtree, out)
            chosen.open_cassette(stack)
            reserve = Reserve(out)
            files.callback(reserve.free)
            ledger = LedgerLines(files.enter_context((out / LEDGER).open("xb", buffering=0)))
            decisions = DecisionLines(files.enter_context((out / DECISIONS).open("xb", buffering=0)))
            books = None
            if spec.has_database:
                books = DatabaseJournal(await _open_database(out, source, stack), settings)
            tables = TableJournal()
            journals: list[Journal] = [ledger, tables] if books is None else [ledger, tables, books]
            run = Backtest.fresh(market, settings, chosen.models, journals, has_baselines=spec.has_evidence)
            if chosen.desk is not None:
                chosen.desk.board = partial(board, run, settings)
            if books is not None:
                await books.begin(source.identity, run.starts_at, run.ends_at, run.baselines)
            output = Output({out / LEDGER: ledger, out / DECISIONS: decisions}, books)
            files.enter_context(interrupts.noticing())
            files.enter_context(deadlines())
            unbegun.pop_all()  # from here on, keep the files
            end = await _go(run, output, decisions, listener, interrupts)
        reserve.free()  # a running database would take the space
        digest = ledger.digest()
        decisions.flush()
        if end.cause == "missing":
            shutil.rmtree(out)
            raise SettingsError([end.reason])
        if output.database_until is not None:
            _write_settings(spec, environ, run.starts_at, output.database_until)
        value, standings = await _conclude(spec, settings, source, run, chosen, end, digest)
        tables.finish(run.accounts)
        if spec.tables is not None:
            _write_tables(spec.out, spec.tables, [*tables.results, *filter(len, [run.series])])
    excursions = [market.excursion(trade) for trade in tables.closed]
    return FinishedBacktest(value, standings, tables, run.series, excursions, end, run.failure)


async def _conclude(
    spec: BacktestSpec, settings: Settings, source: BacktestSource, run: Backtest, chosen: Chosen, end: End, digest: str
) -> tuple[dict[str, Any], list[RankedModel]]:
    """Write the result and the report, and count the trial. Return the result and the accounts by rank.

    :raises OSError: a file cannot be written
    :raises StartError: the ledger of trials cannot be written
    """
    runs = {followed.model.id: statistics_of(run, followed, settings) for followed in run.accounts}
    baselines = {followed.baseline.id: statistics_of_baseline(followed) for followed in run.baselines}
    standings, evidence = rank(run, runs), None
    value = _value(spec, settings, source, run, chosen, end, digest, standings)
    value |= {"baselines": baselines_value(run, baselines), "evidence": None}
    if spec.has_evidence:
        models = {followed.model.id: followed.model for followed in run.accounts}
        evidence = await evidence_report(Field(last_whole_hour(end.reached), models, runs, baselines))
        value["evidence"] = GetEvidenceOutput.of("run", evidence)
    masked = masked_value(spec.entrants.mask, value["accounts"])
    value |= {"capacity": capacity_value(source.rows, run), "masked": masked}
    add_trials(spec.trials, spec.conditions.recording, run, value, counts=end.cause not in _CRASHED)
    (spec.out / RESULT).write_bytes(msgspec.json.format(encode(value)) + b"\n")
    if evidence is not None and spec.tables is not None:
        from trader.backtest.report import make_page  # noqa: PLC0415 - so that a run without one starts sooner

        name = spec.conditions.recording.name
        page = await make_page(run, source, name, labelled(standings, run), runs, baselines, evidence, value)
        (spec.out / REPORT).write_text(page, encoding="utf-8")
    return value, standings


async def _choose(
    spec: BacktestSpec, environ: Mapping[str, str], settings: Settings, source: BacktestSource, stack: AsyncExitStack
) -> Chosen:
    """Return the models with their decision sources. Raises `SettingsError`."""
    entrants, guard = spec.entrants, spec.conditions.guard
    prices = {symbol: recording.minutes.close[0] for symbol, recording in source.recordings.items()}
    chosen = await choose_models(entrants, environ, settings, source.span, stack, prices, guard=guard)
    for _, decides in chosen.models:
        if isinstance(decides, RecordingStrategySource):
            decides.draws = spec.has_evidence
    return chosen.keeping_decisions(entrants.cassette if entrants.keeps_decisions else None)


async def _open_database(out: Path, source: BacktestSource, stack: AsyncExitStack) -> Database:
    """Create the database, with tables, that a service in the folder would use for this market."""
    server = await stack.enter_async_context(EmbeddedPostgres(out / EMBEDDED_FOLDER))
    dsn = await server.ensure_database(database_name(source.identity))
    database = await Database.connect(dsn, size=2, command_timeout_s=_STATEMENT_TIMEOUT_S)
    stack.push_async_callback(database.close)
    await apply_schema(database)
    return database


def _decision_seconds(source: DecisionSource, span: range) -> Iterator[int]:
    second = source.next_after(span.start - 1)
    while second is not None and second < span.stop:
        yield second
        second = source.next_after(second)


def _check_warm_up(chosen: Chosen, market: BacktestMarket) -> None:
    """Check that strategies decide at all: that their warm-up ends within the data. Raises `SettingsError`."""
    end = moment_of(market.span.stop - 1)
    problems: dict[str, None] = {}  # a masked copy has the problems of its model
    for _, source in chosen.models:
        if not isinstance(source, RecordingStrategySource) or not isinstance(source.strategy, LoadedStrategy):
            continue
        strategy = source.strategy
        for symbol, interval in itertools.product(market.markets, strategy.intervals):
            closed = market.count_closed(symbol, interval, end)
            if closed < strategy.warm_up:
                problems[
                    f"{strategy.file}: {strategy.class_name}.warm_up is {strategy.warm_up}, so it would never decide: "
                    f"{symbol} has {closed} closed candles of {interval} at the end, {iso(end)}; it must be at most "
                    f"{closed}, or the data longer"
                ] = None
    if problems:
        raise SettingsError(list(problems))


def _write_settings(spec: BacktestSpec, environ: Mapping[str, str], starts_at: datetime, reached: datetime) -> None:
    """Write the .env file that makes a service in the folder show the result as of the time reached."""
    data = spec.conditions.recording.absolute()
    shown = {
        **environ,
        "MARKET_SOURCE": f"replay:{data}",
        "REPLAY_START": iso(starts_at),
        "REPLAY_END": iso(reached),
        "REPLAY_SPEED": "0",
    }
    lines = ["# The settings of this backtest; `trader serve --demo` in this folder shows its result."]
    lines += [f"{name}={quoted(value)}" for name, value in shown.items()]
    (spec.out / DEFAULT_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


async def _go(
    run: Backtest, output: Output, decisions: DecisionLines, listener: BacktestListener, interrupts: Interrupts
) -> End:
    """Run to the end, or until no model can be called, a strategy or a write fails, or an interrupt arrives.

    It always stops at a time that all accounts have reached.
    """
    reached = run.starts_at
    ended: AskingEnded | None = None
    unwritten: str | None = None
    gc.freeze()  # otherwise every full collection would traverse the candles and indicators
    try:
        for reached in run.run():
            if unwritten is None and not run.is_ahead:
                decisions.take(run.accounts)
                unwritten = await output.keep(run)
            if interrupts or ended is not None or unwritten is not None or run.failure is not None:
                run.engine.skip()
                if not run.is_ahead:
                    break
            elif run.engine.is_due:
                ended = await _invoke(run, interrupts)
            listener.show(reached, run.starts_at, run.ends_at)
    finally:
        gc.unfreeze()
    run.engine.close()
    decisions.take(run.accounts)
    if unwritten is None:
        unwritten = await output.keep(run, is_end=True)
    if unwritten is not None:
        return End(reached, "storage", unwritten)
    if run.failure is not None:
        return End(reached, "strategy", str(run.failure))
    return End(reached) if ended is None else End(reached, ended.cause, str(ended))


def _write_tables(folder: Path, form: Format, tables: Sequence[Table]) -> None:
    """Write the tables; a partly written one is removed. Raises `StartError`."""
    for each in tables:
        try:
            each.write(folder, form)
        except OSError as error:
            file = folder / f"{each.name}.{form}"
            file.unlink(missing_ok=True)
            raise StartError(
                f"{file} cannot be written: {error.strerror}. It is left out; "
                f"{LEDGER}, {DECISIONS}, {RESULT} and {REPORT} are complete."
            ) from error


async def _invoke(run: Backtest, interrupts: Interrupts) -> AskingEnded | None:
    """Execute the invocations that are due; an interrupt cancels them. Return why no model can be called, or None."""
    interrupts.task = asyncio.ensure_future(run.engine.invoke())
    try:
        await interrupts.task
    except AskingEnded as ended:
        return ended
    except asyncio.CancelledError:
        if not interrupts:
            raise
    finally:
        interrupts.task = None
    return None


def _value(
    spec: BacktestSpec,
    settings: Settings,
    source: BacktestSource,
    run: Backtest,
    chosen: Chosen,
    end: End,
    digest: str,
    standings: Sequence[RankedModel],
) -> dict[str, Any]:
    """Return the JSON object of the result."""
    by_files, data = sorted(source.funded_by_files), spec.conditions.recording
    plain = {symbol: source.plain_rate(symbol) for symbol in sorted(set(source.markets) - set(by_files))}
    accounts = {followed.model.id: followed for followed in run.accounts}
    return {
        "program": f"trader {__version__}",
        "data": str(data),
        "markets": list(source.markets),
        "listings": listings_value(source.markets),
        "from": iso(run.starts_at),
        "to": iso(end.reached),
        "complete": end.reached == run.ends_at and end.cause is None,
        "ended": end.reason or None,
        "seed": settings.seed,
        "preset": settings.venue_preset,
        "capital": settings.initial_capital,
        "takerFeeBps": settings.taker_fee_bps,
        "makerFeeBps": settings.maker_fee_bps,
        "latencyMs": settings.latency_ms,
        "cadence": spec.entrants.every or "1m",
        "funding": {"fromFiles": by_files, "hourlyRates": plain},
        "answers": None if chosen.cassette is None else answers_value(chosen, chosen.cassette),
        "ledgerSha256": digest,
        "strategy": strategy_value(chosen),
        "files": {str(path.relative_to(data.parent)): file_digest(path) for path in data_files(data, source.markets)},
        "ownData": {str(path): file_digest(path) for path in spec.conditions.own_data},
        "options": msgspec.to_builtins(replace(spec.conditions.placed(), market=tuple(source.markets)), enc_hook=str),
        "models": [msgspec.to_builtins(model) for model, _ in chosen.models],
        "accounts": [
            account_value(standing, accounts[standing.account.model_id], run.starts_at) for standing in standings
        ],
    }
