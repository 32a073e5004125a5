"""Counterfactual backtests: execute recorded decisions with other fees, another latency or other guard limits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import Model
from trader.backtest.market import BacktestMarket
from trader.backtest.run import Backtest
from trader.backtest.sources import RecordedInvocation, RecordedRun, ReplayedDecisions, read_recorded_run
from trader.backtest.spec import environ_of, open_source, settings_of
from trader.core.errors import SettingsError, StartError
from trader.seasons.sql.report import AccountReport
from trader.settings.settings import Settings

CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "fees": ("taker_fee", "maker_fee"),
    "latency": ("latency",),
    "guard": ("guard",),
}
"""The conditions of each cause, in order of application."""


class Stage(NamedTuple):
    """Accounts by id, under the changed conditions up to and including `cause`.

    `refused` counts, per account, the refusals of each guard rule and, under `exchange`, the exchange's rejections.
    """

    cause: str
    accounts: Mapping[str, AccountReport]
    refused: Mapping[str, Mapping[str, int]]


async def compare_conditions(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Execute the decisions of a backtest as recorded, then again with each changed condition added in turn.

    `changes` has the new conditions, by their names in `CAUSES`; the guard's limits are added to the recorded ones.

    :raises SettingsError: there is no such backtest, or a condition is wrong
    :raises StartError: executing the recorded decisions does not reproduce the recorded ledger
    """
    recorded, decisions = read_recorded_run(folder, "--run")
    if not recorded.complete:
        raise SettingsError([f"--run: the backtest in {folder} ended early, at {recorded.to}; run it to its end first"])
    causes = [cause for cause, names in CAUSES.items() if any(name in changes for name in names)]
    if not causes:
        raise SettingsError(["--run needs another condition: --taker-fee, --maker-fee, --latency or --guard"])
    conditions = recorded.options
    settings, source = await open_source(conditions, environ_of(conditions))
    market = await BacktestMarket.open(source, ())
    stages = [Stage("recorded", *await _execute(market, settings, recorded.models, decisions, conditions.guard))]
    _require_same(recorded, stages[0])
    for cause in causes:
        conditions = replace(conditions, **{name: changes[name] for name in CAUSES[cause] if name in changes})
        changed = settings_of(environ_of(conditions))
        if cause == "fees":  # without them, spreads are wider
            _, source = await open_source(conditions, environ_of(conditions))
            market = await BacktestMarket.open(source, ())
        guard = {**recorded.options.guard, **conditions.guard}
        stages.append(Stage(cause, *await _execute(market, changed, recorded.models, decisions, guard)))
    return _value(folder, changes, recorded, stages)


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


def _value(folder: Path, changes: Mapping[str, Any], recorded: RecordedRun, stages: Sequence[Stage]) -> dict[str, Any]:
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
    changed = {cause: {name: changes.get(name) for name in names} for cause, names in CAUSES.items()}
    return {
        "run": str(folder),
        "from": recorded.from_,
        "to": recorded.to,
        "conditions": [{"cause": stage.cause, **changed[stage.cause]} for stage in stages[1:]],
        "accounts": accounts,
    }
