"""The command backtest: rule agents and AI models trade recorded candles by the rules of the service, in event time."""

import argparse
import asyncio
import gc
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import msgspec

from trader.agents.variants import VARIANTS
from trader.backtest.answers import AskingEnded
from trader.backtest.conditions import compare_conditions, kept_options
from trader.backtest.database import DatabaseJournal
from trader.backtest.ledger import LedgerLines
from trader.backtest.market import BacktestMarket
from trader.backtest.models import Chosen, choose_models
from trader.backtest.options import add_arguments, environ_of, open_source
from trader.backtest.output import Output, Reserve
from trader.backtest.result import (
    account_value,
    answers_value,
    baselines_value,
    capacity_line,
    capacity_value,
    evidence_value,
    labelled,
    masked_value,
    model_lines,
    strategy_value,
)
from trader.backtest.run import Backtest, RunJournal, TableJournal
from trader.backtest.sources import AiSource, DecisionLines, RecordingStrategySource
from trader.backtest.statistics import board, judge
from trader.backtest.sweep import is_sweep, sweep
from trader.backtest.trials import add_trials, deflated_line
from trader.commands.backtest_lines import conditions_lines, sweep_lines
from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Result,
    command,
    print_result,
    run_to_end,
    show,
    table,
    to_wire,
)
from trader.commands.progress import Progress
from trader.commands.serve import program_version
from trader.core.clock import iso
from trader.core.errors import SettingsError, StartError
from trader.database.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres, database_name
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.market.domain.markets import INTERVALS, Interval
from trader.market.sources.replay import ReplaySource
from trader.portfolio.evidence import EvidenceReport
from trader.portfolio.tables import Results, check_format
from trader.seasons.page import RankedModel, SeasonReport, page
from trader.seasons.standings import make_standings
from trader.settings.dotenv import DEFAULT_FILE, quoted
from trader.settings.settings import Settings

LEDGER, DECISIONS, RESULT, REPORT = "ledger.jsonl", "decisions.jsonl", "result.json", "report.html"
"""The files of a backtest, in its folder."""

_ENCODER = msgspec.json.Encoder(decimal_format="number")
_STATEMENT_TIMEOUT_S = 120.0


@command("backtest", example="trader backtest --data candles --variant Apex --out run", arguments=add_arguments)
def backtest(options: argparse.Namespace) -> int:
    """Backtest agents on recorded candles, with the rules of the service and the ledger of a lockstep replay.

    Without --models, --models-from and --strategy the rule agents trade. --strategy sma.py:SmaCross --param window=20
    runs your own class. AI models are called within --budget-usd; their answers are stored, and --models-from
    re-executes them without an API key. --agent scout:Apex serves agent.* and /mcp to an agent of your own in the time
    of the recording, and keeps its decisions in the same way.

    --run RUN --taker-fee 8 --latency 900 --guard leverage-max=3 re-executes the decisions of an earlier backtest under
    other conditions, writes nothing, and prints how each condition changed the result.

    Writes a database, the ledger as JSON lines, the result and a report into a new folder, where `trader serve --demo`
    shows them. Ctrl+C ends the run early; the results so far are written and marked as incomplete.
    """
    if options.folder is not None:
        compared = asyncio.run(compare_conditions(options))
        return print_result(Result(compared, conditions_lines(compared)), as_json=options.json)
    problems = ["--data is missing: the folder of the candles"] if options.data is None else []
    if options.guard and (options.models or options.models_from or options.agent):
        problems.append("--guard: not with AI models, whose prompts state the limits of their variant")
    if options.mask and not options.no_database:
        problems.append("--mask: only with --no-database, as a service would show prompts that contradict its books")
    problems += ["--cluster: only for a sweep"] if options.cluster and not is_sweep(options) else []
    problems += ["--param: only with --strategy"] if options.param and not options.strategy else []
    if options.models is None and options.budget_usd is not None:
        problems.append("--budget-usd: only with --models")
    is_asking = options.models or options.agent or (options.strategy and not options.models_from)
    if options.cassette is not None and (not is_asking or is_sweep(options)):
        problems.append("--cassette: only with --models, --agent or --strategy, in a single run that asks them")
    if options.agent is None:
        serving = {"--deadline": options.deadline, "--listen": options.listen}
        problems += [f"{name}: only with --agent" for name, given in serving.items() if given is not None]
    if problems:
        raise SettingsError(problems)
    check_format(options.tables)
    if is_sweep(options):
        if options.models or options.models_from or options.agent or options.mask:
            raise SettingsError(["--seeds, --walk-forward and ranges of --param: not with AI models, agents or --mask"])
        return _sweep(options)
    if options.out.exists():
        raise StartError(f"{options.out} exists already; --out names a new folder.")
    return asyncio.run(_backtest(options))


def _sweep(options: argparse.Namespace) -> int:
    progress: Progress | None = None

    def show_runs(done: int, count: int) -> None:
        nonlocal progress
        progress = progress or Progress(0, count, "runs")
        progress.show(done)

    value = run_to_end(sweep(options, show_runs))
    if progress is not None:
        progress.end()
    code = EXIT_FAILED if value["failed"] else EXIT_DONE
    return print_result(Result(value, sweep_lines(value, options), code), as_json=options.json)


async def _backtest(options: argparse.Namespace) -> int:
    environ = environ_of(options)
    settings, source = await open_source(options, environ)
    try:
        async with AsyncExitStack() as files:
            async with AsyncExitStack() as stack:
                prices = {symbol: recording.minutes.close[0] for symbol, recording in source.recordings.items()}
                chosen = (
                    await choose_models(options, environ, settings, source.span, stack, prices)
                ).keeping_decisions(options.cassette)
                for line in chosen.agent_lines:
                    show(line, on_stderr=True)
                market = await BacktestMarket.open(source, _intervals(chosen))
                options.out.mkdir(parents=True, exist_ok=False)
                unbegun = files.enter_context(ExitStack())
                unbegun.callback(shutil.rmtree, options.out)
                chosen.open_cassette(stack)
                reserve = Reserve(options.out)
                files.callback(reserve.free)
                ledger = LedgerLines(files.enter_context((options.out / LEDGER).open("xb", buffering=0)))
                decisions = DecisionLines(files.enter_context((options.out / DECISIONS).open("xb", buffering=0)))
                books = None
                if not options.no_database:
                    books = DatabaseJournal(await _open_database(options.out, source, stack), settings)
                tables = TableJournal()
                journals: list[RunJournal] = [ledger, tables] if books is None else [ledger, tables, books]
                run = Backtest.fresh(market, settings, chosen.models, journals)
                chosen.show_board(partial(board, run, settings))
                if books is not None:
                    await books.begin(source.identity, run.starts_at, run.ends_at, run.baselines)
                output = Output({options.out / LEDGER: ledger, options.out / DECISIONS: decisions}, books)
                interrupted = files.enter_context(_noticing_interrupts())
                unbegun.pop_all()  # from here on, keep the files
                end = await _go(run, output, decisions, interrupted)
            reserve.free()  # a running database would take the space
            digest = ledger.digest()
            decisions.flush()
            if end.cause == "missing":
                shutil.rmtree(options.out)
                raise SettingsError([end.reason])
            if output.database_until is not None:
                _write_settings(options, environ, run.starts_at, output.database_until)
            standings = make_standings(run.reports(), run.equity_hours())
            evidence = await judge(run, source, settings, end.reached)
            value = _value(options, settings, source, run, chosen, end, digest, standings)
            value |= {"baselines": baselines_value(run), "evidence": evidence_value(evidence)}
            value["capacity"] = capacity_value(source.rows, run)
            value["masked"] = masked_value(options.mask, value["accounts"])
            add_trials(options, run, value, counts=end.cause not in ("strategy", "storage"))
            _write_result(options, run, value, labelled(standings, run), evidence)
            _write_tables(options, tables.finish(run.accounts))
    except OSError as error:
        raise StartError(f"{error.filename or options.out} cannot be written: {error.strerror}.") from error
    code = EXIT_FAILED if end.cause else EXIT_DONE if value["complete"] else EXIT_INTERRUPTED
    return print_result(Result(value, _lines(value, standings, options), code), as_json=options.json)


async def _open_database(out: Path, source: ReplaySource, stack: AsyncExitStack) -> Database:
    """Create the database, with tables, that a service in the folder would use for this market."""
    server = await stack.enter_async_context(EmbeddedPostgres(out / EMBEDDED_FOLDER))
    dsn = await server.ensure_database(database_name(source.identity))
    database = await Database.connect(dsn, size=2, command_timeout_s=_STATEMENT_TIMEOUT_S)
    stack.push_async_callback(database.close)
    await apply_schema(database)
    return database


def _intervals(chosen: Chosen) -> set[Interval]:
    """Return the candle intervals that the models may read: all of them if there are AI models."""
    if any(isinstance(source, AiSource) for _, source in chosen.models):
        return set(INTERVALS)
    own = {
        each
        for _, source in chosen.models
        if isinstance(source, RecordingStrategySource)
        for each in source.strategy.intervals
    }
    return own | {each for model, _ in chosen.models for each in VARIANTS[model.variant].agent.intervals}


def _write_settings(
    options: argparse.Namespace, environ: Mapping[str, str], starts_at: datetime, reached: datetime
) -> None:
    """Write the .env file that makes a service in the folder show the result as of the time reached."""
    data = options.data.absolute()
    shown = {
        **environ,
        "MARKET_SOURCE": f"replay:{data}",
        "REPLAY_START": iso(starts_at),
        "REPLAY_END": iso(reached),
        "REPLAY_SPEED": "0",
    }
    lines = ["# The settings of this backtest; `trader serve --demo` in this folder shows its result."]
    lines += [f"{name}={quoted(value)}" for name, value in shown.items()]
    (options.out / DEFAULT_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


class End(NamedTuple):
    """The end of a backtest: the time reached, and the cause of an early end (None: it reached its end).

    It ends early if no model can be called anymore, a strategy fails, or the disk or the database refuses writes.
    """

    reached: datetime
    cause: Literal["budget", "provider", "missing", "storage", "strategy"] | None = None
    reason: str = ""


async def _go(run: Backtest, output: Output, decisions: DecisionLines, interrupted: "Interrupts") -> End:
    """Run to the end, or until no model can be called, a strategy or a write fails, or Ctrl+C arrives.

    It always stops at a time that all accounts have reached.
    """
    gc.collect()
    gc.freeze()  # otherwise every full collection would traverse the candles and indicators
    reached, progress = run.starts_at, Progress(run.starts_at, run.ends_at)
    ended: AskingEnded | None = None
    unwritten: str | None = None
    for reached in run.run():
        if unwritten is None and not run.is_ahead:
            decisions.take(run.accounts)
            unwritten = await output.keep(reached, run.marks())
        if interrupted or ended is not None or unwritten is not None or run.failure is not None:
            run.skip()
            if not run.is_ahead:
                break
        elif run.is_due:
            ended = await _invoke(run, interrupted)
        progress.show(reached)
    decisions.take(run.accounts)
    if unwritten is None:
        unwritten = await output.keep(reached, run.marks(), is_end=True)
    progress.end()
    if unwritten is not None:
        return End(reached, "storage", unwritten)
    if run.failure is not None:
        return End(reached, "strategy", str(run.failure))
    return End(reached) if ended is None else End(reached, ended.cause, str(ended))


def _write_result(
    options: argparse.Namespace,
    run: Backtest,
    value: Mapping[str, Any],
    standings: Sequence[RankedModel],
    evidence: EvidenceReport,
) -> None:
    """Write the result and the report. Raises `OSError`."""
    (options.out / RESULT).write_bytes(msgspec.json.format(_ENCODER.encode(to_wire(value))) + b"\n")
    season = SeasonReport(options.data.name, standings, [], run.outcomes(), evidence, "Backtest")
    (options.out / REPORT).write_text(page(season), encoding="utf-8")


def _write_tables(options: argparse.Namespace, tables: Results) -> None:
    """Write the tables; a partly written one is removed. Raises `StartError`."""
    for each in tables:
        try:
            each.write(options.out, options.tables)
        except OSError as error:
            file = options.out / f"{each.name}.{options.tables}"
            file.unlink(missing_ok=True)
            raise StartError(
                f"{file} cannot be written: {error.strerror}. It is left out; "
                f"{LEDGER}, {DECISIONS}, {RESULT} and {REPORT} are complete."
            ) from error


async def _invoke(run: Backtest, interrupted: "Interrupts") -> AskingEnded | None:
    """Execute the invocations that are due; Ctrl+C cancels them. Return why no model can be called, or None."""
    interrupted.task = asyncio.ensure_future(run.invoke())
    try:
        await interrupted.task
    except AskingEnded as ended:
        return ended
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        interrupted.task = None
    return None


class Interrupts(list[int]):
    """The signals received so far; each one cancels `task`."""

    task: asyncio.Task[None] | None = None


@contextmanager
def _noticing_interrupts() -> Iterator[Interrupts]:
    """Record Ctrl+C and SIGTERM instead of raising KeyboardInterrupt, which could cut the ledger within a change."""
    noticed, loop = Interrupts(), asyncio.get_running_loop()

    def note(number: int, _: FrameType | None) -> None:
        noticed.append(number)
        if noticed.task is not None:
            loop.call_soon_threadsafe(noticed.task.cancel)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _value(
    options: argparse.Namespace,
    settings: Settings,
    source: ReplaySource,
    run: Backtest,
    chosen: Chosen,
    end: End,
    digest: str,
    standings: Sequence[RankedModel],
) -> dict[str, Any]:
    """Return the JSON object of the result."""
    by_files = sorted(source.funded_by_files)
    plain = {symbol: source.plain_rate(symbol) for symbol in sorted(set(source.markets) - set(by_files))}
    models = {model.id: model for model, _ in chosen.models}
    return {
        "program": program_version(),
        "data": str(options.data),
        "markets": list(source.markets),
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
        "cadence": options.cadence or "1m",
        "funding": {"fromFiles": by_files, "hourlyRates": plain},
        "answers": None if chosen.cassette is None else answers_value(chosen, chosen.cassette),
        "ledgerSha256": digest,
        "strategy": strategy_value(options, chosen),
        "options": kept_options(options, list(source.markets)),
        "models": [msgspec.to_builtins(model) for model, _ in chosen.models],
        "accounts": [
            account_value(standing, models[standing.account.model_id], run.starts_at) for standing in standings
        ],
    }


def _lines(value: Mapping[str, Any], standings: Sequence[RankedModel], options: argparse.Namespace) -> Iterator[str]:
    heads = ("account", "equity", "return", "drawdown", "trades", "fees", "funding")
    yield from table(
        heads,
        (
            (
                standing.account.model_id,
                f"{standing.account.equity:,.2f}",
                f"{standing.return_percent:+.2f} %",
                f"{standing.drawdown:.2f} %",
                f"{standing.account.trades}",
                f"{standing.account.fees + standing.account.liquidation_fees:,.2f}",
                f"{standing.account.funding:,.2f}",
            )
            for standing in standings
        ),
    )
    for baseline in value["baselines"]:
        yield f"{baseline['name']}: {baseline['equity']:,.2f}, {baseline['returnPercent']:+.2f} %"
    funding = value["funding"]
    named = [f"{', '.join(funding['fromFiles'])} from files"] if funding["fromFiles"] else []
    named += [f"{symbol} {rate} an hour" for symbol, rate in funding["hourlyRates"].items()]
    yield f"{', '.join(value['markets'])}, {value['from']} to {value['to']}; funding: {'; '.join(named)}"
    yield capacity_line(value["capacity"])
    yield from model_lines(value)
    for account in value["accounts"]:
        yield deflated_line(account["id"], account["deflated"])
    if not value["complete"] and value["ended"] is None:
        yield "Interrupted: this is only part of the requested period."
    yield f"ledger SHA-256 {value['ledgerSha256']}"
    yield f"{options.out}: {LEDGER}, {DECISIONS}, {RESULT}, {REPORT}"
    if not options.no_database and (options.out / DEFAULT_FILE).exists():
        yield f"Dashboard: cd {shlex.quote(str(options.out))} && trader serve --demo"
