"""Counterfactual backtests: recorded decisions executed with other fees, another latency or other guard limits."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from trader.commands.backtest_options import environ_of, guard_of, open_source, settings_of
from trader.commands.command import Result, table
from trader.domain.models import Model
from trader.errors import SettingsError, StartError
from trader.services.backtest.market import BacktestMarket
from trader.services.backtest.run import Backtest
from trader.services.backtest.sources import RecordedInvocation, RepeatedSource, read_decisions
from trader.settings import Settings
from trader.store.portfolio.season import AccountReport

CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "fees": ("taker_fee", "maker_fee"),
    "latency": ("latency",),
    "guard": ("guard",),
}
"""The options of each cause, in the order in which the causes are applied."""

KEPT: Final = (
    "data", "market", "start", "end", "capital", "taker_fee", "maker_fee", "latency", "funding", "preset", "seed",
    "thinking", "guard", "markets_file",
)  # fmt: skip
"""The options that a result keeps, since they decide under which conditions it came about."""

_OTHERS: Final = ("json", "run", "folder", "env_file", "out", "no_database", "tables", "trials", "workers", "cluster")
"""What may stand beside the conditions, or has a default."""


class RecordedAccount(msgspec.Struct):
    id: str
    equity: Decimal


class RecordedRun(msgspec.Struct, rename="camel"):
    """The parts of a result that are needed to execute its decisions again."""

    program: str
    from_: str = msgspec.field(name="from")
    to: str
    complete: bool
    options: dict[str, Any]
    models: list[Model]
    accounts: list[RecordedAccount]


class Stage(NamedTuple):
    """Accounts by id, with the changed conditions up to and including `cause`.

    `refused` has how often each rule of the guard refused, and `exchange` what the exchange rejected.
    """

    cause: str
    accounts: Mapping[str, AccountReport]
    refused: Mapping[str, Mapping[str, int]]


def kept_options(options: argparse.Namespace, markets: Sequence[str]) -> dict[str, Any]:
    """Return the options as the result stores them: with market names and absolute paths."""
    kept = {name: getattr(options, name) for name in KEPT}
    funding = options.funding
    if funding is not None and Path(funding).is_dir():
        funding = str(Path(funding).absolute())
    rows = options.markets_file
    return kept | {
        "data": str(options.data.absolute()),
        "market": list(markets),
        "funding": funding,
        "markets_file": None if rows is None else str(rows.absolute()),
    }


async def compare_conditions(options: argparse.Namespace) -> Result:
    """Execute the decisions of a backtest as recorded, then again with each changed condition added in turn.

    :raises SettingsError: there is no such backtest, or an option is wrong
    :raises StartError: executing the recorded decisions does not reproduce the recorded ledger
    """
    recorded, decisions = _read(options.folder)
    recorded_guard = guard_of(recorded.options.get("guard"))
    guard = recorded_guard | guard_of(options.guard)
    causes = [cause for cause, names in CAUSES.items() if any(getattr(options, name) is not None for name in names)]
    if unwanted := sorted(_given(options) - {name for names in CAUSES.values() for name in names}):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unwanted)
        raise SettingsError([f"{names}: not with --run, which takes everything but fees, latency and guard from there"])
    if not causes:
        raise SettingsError(["--run needs another condition: --taker-fee, --maker-fee, --latency or --guard"])
    rows = recorded.options.get("markets_file")  # results of earlier versions have none
    paths = {"data": Path(recorded.options["data"]), "markets_file": None if rows is None else Path(rows)}
    conditions = argparse.Namespace(**{**recorded.options, **paths})
    settings, source = await open_source(conditions, environ_of(conditions))
    market = await BacktestMarket.open(source, ())
    stages = [Stage("recorded", *await _execute(market, settings, recorded.models, decisions, recorded_guard))]
    _require_same(recorded, stages[0])
    for number in range(len(causes)):
        applied = causes[: number + 1]
        for name in (name for cause in applied for name in CAUSES[cause] if name != "guard"):
            if getattr(options, name) is not None:
                setattr(conditions, name, getattr(options, name))
        changed = settings_of(environ_of(conditions))
        limits = guard if "guard" in applied else recorded_guard
        stages.append(Stage(causes[number], *await _execute(market, changed, recorded.models, decisions, limits)))
    value = _value(options, recorded, stages)
    return Result(value, _lines(value))


def _given(options: argparse.Namespace) -> set[str]:
    return {name for name, value in vars(options).items() if value is not None and name not in _OTHERS}


def _read(folder: Path) -> tuple[RecordedRun, dict[str, list[RecordedInvocation]]]:
    try:
        recorded = msgspec.json.decode((folder / "result.json").read_bytes(), type=RecordedRun)
        decisions = read_decisions(folder / "decisions.jsonl")
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(
            [f"--run is {str(folder)!r}; it must be the folder of a backtest (result.json, decisions.jsonl): {error}"]
        ) from None
    if not recorded.complete:
        raise SettingsError([f"--run: the backtest in {folder} ended early, at {recorded.to}; run it to its end first"])
    return recorded, decisions


async def _execute(
    market: BacktestMarket,
    settings: Settings,
    models: Sequence[Model],
    decisions: Mapping[str, Sequence[RecordedInvocation]],
    guard: Mapping[str, int],
) -> tuple[dict[str, AccountReport], dict[str, Counter[str]]]:
    """Return the accounts and what was refused, both by the id of the account."""
    sources = [(model, RepeatedSource(model, decisions.get(model.id, []))) for model in models]
    run = Backtest(market, settings, sources, [], has_baselines=False)
    for followed in run.accounts:
        followed.limits = msgspec.structs.replace(followed.limits, **guard)
    for _ in run.run():
        if run.is_due:
            await run.invoke()
    reports = {report.model_id: report for report in run.reports()}
    refused = {
        each.model.id: Counter(outcome.rule for outcome in each.outcomes if outcome.rule) for each in run.accounts
    }
    return reports, refused


def _require_same(recorded: RecordedRun, stage: Stage) -> None:
    for account in recorded.accounts:
        equity = stage.accounts[account.id].equity
        if equity != account.equity:
            raise StartError(
                f"The decisions of {account.id} give an equity of {equity:f}, and recorded is {account.equity:f}: the "
                f"candles have changed since, or the program ({recorded.program} recorded it)."
            )


def _value(options: argparse.Namespace, recorded: RecordedRun, stages: Sequence[Stage]) -> dict[str, Any]:
    accounts = []
    for account in recorded.accounts:
        equities = [stage.accounts[account.id].equity for stage in stages]
        accounts.append(
            {
                "id": account.id,
                "recorded": equities[0],
                "parts": [
                    {"cause": stage.cause, "change": after - before}
                    for stage, before, after in zip(stages[1:], equities, equities[1:], strict=False)
                ],
                "equity": equities[-1],
                "change": equities[-1] - equities[0],
                "trades": {stage.cause: stage.accounts[account.id].trades for stage in stages},
                "refused": {stage.cause: stage.refused[account.id] for stage in stages},
            }
        )
    changed = {cause: {name: getattr(options, name) for name in names} for cause, names in CAUSES.items()}
    return {
        "run": str(options.folder),
        "from": recorded.from_,
        "to": recorded.to,
        "conditions": [{"cause": stage.cause, **changed[stage.cause]} for stage in stages[1:]],
        "accounts": accounts,
    }


def _lines(value: Mapping[str, Any]) -> Iterator[str]:
    causes = [condition["cause"] for condition in value["conditions"]]
    yield f"The same decisions under other conditions: {value['run']}, {value['from']} to {value['to']}"
    changes = [f"other {cause}" for cause in causes]
    heads = ("account", "as recorded", *changes, "equity now", "change", "trades", "refused")
    yield from table(
        heads,
        (
            (
                account["id"],
                f"{account['recorded']:,.2f}",
                *(f"{part['change']:+,.2f}" for part in account["parts"]),
                f"{account['equity']:,.2f}",
                f"{account['change']:+,.2f}",
                _then(list(account["trades"].values())),
                _then([sum(refused.values()) for refused in account["refused"].values()]),
            )
            for account in value["accounts"]
        ),
    )
    for account in value["accounts"]:
        before, after = (Counter(account["refused"][cause]) for cause in ("recorded", causes[-1]))
        if more := +(after - before):
            rules = ", ".join(f"{count} by {rule}" for rule, count in more.most_common())
            yield f"{account['id']}: refused only under these conditions: {rules}"
    yield (
        f"The conditions were applied one after another: {', then '.join(causes)}. Each column is what its own adds to "
        "those before it; in another order the parts would be others, and their sum the same."
    )
    yield "An agent that had traded under these conditions would have decided otherwise."


def _then(counts: Sequence[int]) -> str:
    """Format the first and the last of the counts."""
    return f"{counts[0]:,} → {counts[-1]:,}"
