"""Counterfactual backtests: execute recorded decisions with other fees, another latency or other guard limits."""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from trader.agents.domain.models import Model
from trader.backtest.market import BacktestMarket
from trader.backtest.options import environ_of, guard_of, open_source, settings_of
from trader.backtest.run import Backtest
from trader.backtest.sources import RecordedInvocation, ReplayedDecisions, read_decisions
from trader.core.errors import SettingsError, StartError
from trader.seasons.sql.report import AccountReport
from trader.settings.settings import Settings

CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "fees": ("taker_fee", "maker_fee"),
    "latency": ("latency",),
    "guard": ("guard",),
}
"""The options of each cause, in order of application."""

KEPT: Final = (
    "data", "market", "start", "end", "capital", "taker_fee", "maker_fee", "latency", "funding", "preset", "seed",
    "thinking", "guard", "markets_file",
)  # fmt: skip
"""The options that a result stores, since they determine its conditions."""

_OTHERS: Final = (
    "json", "run", "folder", "env_file", "out", "no_database", "tables", "trials", "workers", "cluster", "send_keys_to",
)  # fmt: skip
"""Options that may accompany the conditions, or have a default."""


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
    """Accounts by id, under the changed conditions up to and including `cause`.

    `refused` counts, per account, the refusals of each guard rule and, under `exchange`, the exchange's rejections.
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


async def compare_conditions(options: argparse.Namespace) -> dict[str, Any]:
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
        raise SettingsError([f"{names}: not allowed with --run, which only accepts other fees, latency and guard"])
    if not causes:
        raise SettingsError(["--run needs another condition: --taker-fee, --maker-fee, --latency or --guard"])
    rows = recorded.options["markets_file"]
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
    return _value(options, recorded, stages)


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
    """Return the accounts and the counts of refusals, both by account id."""
    sources = [(model, ReplayedDecisions(model, decisions.get(model.id, []))) for model in models]
    run = Backtest.fresh(market, settings, sources, [], has_baselines=False)
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
                f"The decisions of {account.id} give an equity of {equity:f}, but {account.equity:f} was recorded: the "
                f"candles or the program have changed since (program {recorded.program} recorded it)."
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
