"""The command backtest: rule agents and AI models trade recorded candles by the rules of the service, in event time."""

import argparse
import asyncio
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from trader.agents.domain.invocations import FAILED_ENDS
from trader.backtest.execution import LEDGER, REPORT, BacktestListener, Interrupts, execute
from trader.backtest.run import CAUSES, compare_conditions
from trader.backtest.spec import DECISIONS, RESULT, BacktestSpec, conditions_of, every_of, flag_of, params_of
from trader.backtest.sweep import SweepSpec, grid_of, is_grid, sweep
from trader.backtest.sweep_result import METRICS
from trader.backtest.trials import TRIALS
from trader.commands.backtest_lines import (
    capacity_lines,
    conditions_lines,
    deflated_line,
    ended_lines,
    model_lines,
    refused_line,
    sweep_lines,
)
from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Result,
    command,
    count_argument,
    run_to_end,
    table,
)
from trader.commands.progress import Progress, ProgressListener
from trader.commands.simulation_options import add_condition_options, add_participant_options, participants_of
from trader.core.errors import SettingsError
from trader.seasons.standings import RankedModel
from trader.settings.dotenv import DEFAULT_FILE

_OTHERS: Final = (
    "json", "run", "folder", "env_file", "out", "no_database", "tables", "trials", "workers", "cluster", "reports",
    "send_keys_to",
)  # fmt: skip
"""Options that may accompany the conditions of --run, or have a default."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="1-minute candles as Binance publishes them")
    add("--from", dest="start", metavar="TIME", help="ISO 8601 in UTC; default: a day after the first candle")
    add("--to", dest="end", metavar="TIME", help="default: the last candle")
    add("--markets-file", type=lambda text: Path(text).absolute(), metavar="FILE", help="file defining more markets")
    add("--capital", help="capital of each account; default: 10000")
    add("--maker-fee", metavar="BPS", help="default: the preset's")
    add(
        "--cadence",
        metavar="EVERY",
        help="how often agents decide, such as 5m; on recorded books also 10s; default: 1m",
    )
    add_condition_options(parser)
    add_participant_options(parser)
    add("--thinking", choices=["on", "off"], help="whether time passes while an AI model thinks; default: on")
    add("--models-from", metavar="PLACE", help="a cassette, a backtest or a database with decisions; no model is asked")
    add(
        "--run", dest="folder", type=Path, metavar="RUN", help="folder of a backtest whose decisions are executed again"
    )
    add("--with", action="append", type=Path, metavar="FILE", help="own dated columns for `view.data`; may be repeated")
    add("--guard", action="append", metavar="NAME=NUMBER|none", help="another limit of the guard; none: no guard")
    add("--seed", help="seed of the price paths within minutes; default: 0")
    _add_sweep(add)
    add("--trials", metavar="FILE", help="the trial ledger; default: trials.jsonl next to --out")
    add("--out", type=Path, default=Path("backtest"), metavar="FOLDER", help="default: backtest")
    add(
        "--tables",
        choices=["csv", "parquet"],
        default="csv",
        help="file format of trades, fills, equity and decisions",
    )
    add("--no-database", action="store_true", help="write only the ledger as JSON lines, the result and the report")


def _add_sweep(add: Callable[..., argparse.Action]) -> None:
    """Add the options of many runs at once."""
    add("--seeds", type=count_argument, metavar="N", help="a sweep: repeats each run with N seeds, from --seed on")
    add(
        "--walk-forward",
        metavar="CHOOSE/TRY",
        help="a sweep: 7d/1d chooses parameters on 7 days and tries them on the next day",
    )
    add("--by", choices=list(METRICS), help="the metric by which a sweep chooses; default: return")
    add("--reports", action="store_true", help="evidence and a report for every run of a sweep, not only the best")
    add("--workers", type=count_argument, metavar="N", help="concurrent runs of a sweep; default: the number of cores")
    add("--cluster", metavar="ADDRESS", help="address of a Dask scheduler whose workers execute the runs of a sweep")


@command("backtest", example="trader lab backtest --data candles --variant Apex --out run", arguments=_arguments)
def backtest(options: argparse.Namespace) -> Result:
    """Backtest agents on recorded candles, by the rules of the service.

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
        return _compare(options)
    is_sweep = is_grid(options.param) or options.seeds is not None or options.walk_forward is not None
    problems = ["--data is missing: the folder of the candles"] if options.data is None else []
    sweep_only = {"--cluster": options.cluster, "--by": options.by, "--reports": options.reports}
    problems += [f"{name}: only for a sweep" for name, given in sweep_only.items() if given and not is_sweep]
    problems += ["--param: only with --strategy"] if options.param and not options.strategy else []
    is_asking = options.models or options.agent or (options.strategy and not options.models_from)
    if options.cassette is not None and (not is_asking or is_sweep):
        problems.append("--cassette: only with --models, --agent or --strategy, in a single run that asks them")
    if is_sweep and (options.models or options.models_from or options.agent or options.mask):
        problems.append("--seeds, --walk-forward and ranges of --param: not with AI models, agents or --mask")
    if problems:
        raise SettingsError(problems)
    return _sweep(options) if is_sweep else _run(options, _spec_of(options, params_of(options.param)))


def _spec_of(options: argparse.Namespace, params: Mapping[str, str]) -> BacktestSpec:
    """Return the spec that the options describe. Raises `SettingsError`."""
    entrants = participants_of(
        options,
        params=params,
        every=every_of(options.cadence),
        models_from=options.models_from,
        keeps_decisions=options.cassette is not None,
    )
    return BacktestSpec(
        conditions=conditions_of(options.data, vars(options), options.guard or ()),
        entrants=entrants,
        out=options.out,
        trials=Path(options.trials or options.out.absolute().parent / TRIALS).absolute(),
        tables=options.tables,
        has_database=not options.no_database,
    )


def _compare(options: argparse.Namespace) -> Result:
    """Execute the decisions of an earlier backtest under other conditions."""
    allowed = [name for names in CAUSES.values() for name in names]
    given = {name for name, value in vars(options).items() if value is not None and name not in _OTHERS}
    if unwanted := sorted(f"--{flag_of(name)}" for name in given - set(allowed)):
        names = ", ".join(unwanted)
        raise SettingsError([f"{names}: not allowed with --run, which only accepts other fees, latency and guard"])
    changed = conditions_of(None, vars(options), options.guard or ())
    changes = {name: getattr(changed, name) for name in allowed if name in given}
    compared = asyncio.run(compare_conditions(options.folder, changes))
    return Result(compared, conditions_lines(compared))


def _sweep(options: argparse.Namespace) -> Result:
    progress: Progress | None = None

    def show_runs(done: int, count: int) -> None:
        nonlocal progress
        progress = progress or Progress(0, count, "runs")
        progress.show(done)

    spec = SweepSpec(
        base=_spec_of(options, {}),
        grid=tuple(grid_of(options.param)),
        seeds=options.seeds or 1,
        walk_forward=options.walk_forward,
        by=options.by or "return",
        reports=options.reports,
        workers=options.workers,
        cluster=options.cluster,
    )
    value = run_to_end(sweep(spec, show_runs))
    if progress is not None:
        progress.end()
    code = EXIT_FAILED if value["failed"] else EXIT_DONE
    return Result(value, sweep_lines(value, spec), code)


class _MarketTimeListener(ProgressListener, BacktestListener):
    """Shows the market time that a backtest has reached."""

    def show(self, reached: datetime, starts_at: datetime, ends_at: datetime) -> None:
        self._progress = self._progress or Progress(starts_at, ends_at)
        self._progress.show(reached)


def _run(options: argparse.Namespace, spec: BacktestSpec) -> Result:
    listener = _MarketTimeListener()
    try:
        finished = asyncio.run(execute(spec, listener, Interrupts()))
    finally:
        listener.end()
    value = finished.value
    code = EXIT_FAILED if finished.end.cause else EXIT_DONE if value["complete"] else EXIT_INTERRUPTED
    return Result(value, _lines(value, finished.standings, spec), code)


def _lines(value: Mapping[str, Any], standings: Sequence[RankedModel], spec: BacktestSpec) -> Iterator[str]:
    yield from ended_lines(value)
    heads = ("account", "equity", "return", "drawdown", "trades", "under 1 min", "fees", "funding")
    yield from table(
        heads,
        (
            (
                standing.account.model_id,
                f"{standing.account.equity:,.2f}",
                f"{standing.return_percent:+.2f} %",
                f"{standing.drawdown:.2f} %",
                f"{standing.account.trades}",
                f"{standing.account.within_minute}",
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
    yield from capacity_lines(value["capacity"])
    yield from model_lines(value)
    yield from (refused_line(account) for account in value["accounts"] if account["refused"])
    for account in value["accounts"]:
        if failed := ", ".join(f"{count:,} by {end}" for end, count in account["ended"].items() if end in FAILED_ENDS):
            yield f"{account['id']}: failed cycles, which decide nothing, ended {failed}"
    for account in value["accounts"]:
        yield deflated_line(account["id"], account["deflated"])
    if not value["complete"] and value["ended"] is None:
        yield "Interrupted: this is only part of the requested period."
    yield f"ledger SHA-256 {value['ledgerSha256']}"
    yield f"{spec.out}: {LEDGER}, {DECISIONS}, {RESULT}, {REPORT}"
    if spec.has_database and (spec.out / DEFAULT_FILE).exists():
        yield f"Dashboard: cd {shlex.quote(str(spec.out))} && trader serve --demo"
    yield from ended_lines(value)
