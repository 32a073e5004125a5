"""Run of a backtest: its parts, built from settings and models, and the result of each model.

`compare_conditions` runs recorded decisions again, with other fees, another latency or other limits of the guard.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import Model, ModelConfiguration, rule_model
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import DecisionSource, ModelAccount, open_model_account
from trader.backtest.advance import Journal
from trader.backtest.baselines import BaselineAccount, open_baselines
from trader.backtest.engine import Engine
from trader.backtest.market import BacktestMarket
from trader.backtest.sources import (
    RecordedInvocation,
    RecordedRun,
    RecordingStrategySource,
    ReplayedDecisions,
    read_recorded_run,
)
from trader.backtest.spec import environ_of, open_source, settings_of
from trader.core.clock import moment_of
from trader.core.errors import SettingsError, StartError, StrategyError
from trader.core.money import ZERO
from trader.core.variant_id import VariantId
from trader.exchange.domain.account import Marks, equity
from trader.exchange.domain.ledger import ExchangeRules
from trader.exchange.protocol import rules_of
from trader.portfolio.tables import Table
from trader.settings.settings import Settings


class Backtest:
    """A backtest over an open source. `run` may be stopped early; the results until then are valid."""

    def __init__(
        self,
        market: BacktestMarket,
        rules: ExchangeRules,
        accounts: Sequence[ModelAccount],
        baselines: Sequence[BaselineAccount],
        journals: Sequence[Journal],
    ) -> None:
        self.market, self.rules = market, rules
        self.starts_at, self.ends_at = moment_of(market.span.start), moment_of(market.span.stop - 1)
        self._reached = market.span.start
        self.accounts, self.baselines = accounts, baselines
        for followed, journal in itertools.product(accounts, journals):
            journal.open(followed)
        self.engine = Engine(market, rules, [*accounts, *baselines], journals)

    @classmethod
    def fresh(
        cls,
        market: BacktestMarket,
        settings: Settings,
        models: Sequence[tuple[Model, DecisionSource]],
        journals: Sequence[Journal],
        *,
        has_baselines: bool = True,
    ) -> "Backtest":
        """Return a backtest of models whose accounts open with it."""
        starts_at, variants = moment_of(market.span.start), {model.variant for model, _ in models}
        accounts = [open_model_account(model, source, settings, starts_at) for model, source in models]
        baselines = open_baselines(market, settings, variants) if has_baselines else []
        return cls(market, rules_of(settings, market.markets), accounts, baselines, journals)

    def run(self) -> Iterator[datetime]:
        """Advance through the market, and yield the time reached about once per hour of market time."""
        for second in self.engine.run():
            self._reached = min(second, self.market.span.stop - 1)
            yield moment_of(self._reached)

    @property
    def reached(self) -> datetime:
        """The time reached."""
        return moment_of(self._reached)

    @property
    def is_ahead(self) -> bool:
        """Whether an invocation has advanced an account beyond the time reached."""
        return self.engine.is_ahead(self._reached)

    @property
    def failure(self) -> StrategyError | None:
        """The failure of a strategy, which has decided nothing since; None if none has failed."""
        sources = (each.source for each in self.accounts if isinstance(each.source, RecordingStrategySource))
        return next((each.failure for each in sources if each.failure is not None), None)

    def marks(self) -> Marks:
        """Return the marks at the time reached."""
        return self.market.marks(self._reached)

    @property
    def series(self) -> Table:
        """The own series of the strategy file, of which a backtest has at most one."""
        sources = (each.source for each in self.accounts if isinstance(each.source, RecordingStrategySource))
        return next((each.series for each in sources if len(each.series)), Table("series"))

    def largest_executions(self) -> Mapping[str, Decimal]:
        """Return the largest notional that one account executed at once in each market."""
        return {
            symbol: max((followed.largest.get(symbol, ZERO) for followed in self.accounts), default=ZERO)
            for symbol in self.market.markets
        }


def rule_models(
    variants: Sequence[VariantId], every: str | None, at: datetime, guard: Mapping[str, int]
) -> list[tuple[Model, DecisionSource]]:
    """Return the models of the variants' rule agents, which decide at the interval `every` (None: every minute).

    `guard` has the guard limits that differ from the variants' own.
    """
    models: list[tuple[Model, DecisionSource]] = []
    for variant in variants:
        model, agent = rule_model(variant, at), VARIANTS[variant].agent()
        agent.limits = msgspec.structs.replace(agent.limits, **guard)
        model = msgspec.structs.replace(model, configuration=ModelConfiguration(every=every))
        models.append((model, RecordingStrategySource(model, agent)))
    return models


CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "fees": ("taker_fee", "maker_fee"),
    "latency": ("latency",),
    "guard": ("guard",),
}
"""The conditions of each cause, in order of application."""


class Stage(NamedTuple):
    """The accounts by id, under the changed conditions up to and including `cause`.

    `trades` counts the completed trades, and `refused` the refusals of each guard rule and, under `exchange`, the
    exchange's rejections.
    """

    cause: str
    equity: Mapping[str, Decimal]
    trades: Mapping[str, int]
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
    stages = [await _execute("recorded", market, settings, recorded.models, decisions, conditions.guard)]
    _require_same(recorded, stages[0])
    for cause in causes:
        conditions = replace(conditions, **{name: changes[name] for name in CAUSES[cause] if name in changes})
        changed = settings_of(environ_of(conditions))
        guard = {**recorded.options.guard, **conditions.guard}
        stages.append(await _execute(cause, market, changed, recorded.models, decisions, guard))
    return _value(folder, changes, recorded, stages)


async def _execute(
    cause: str,
    market: BacktestMarket,
    settings: Settings,
    models: Sequence[Model],
    decisions: Mapping[str, Sequence[RecordedInvocation]],
    guard: Mapping[str, int],
) -> Stage:
    sources = [(model, ReplayedDecisions(model, decisions.get(model.id, []))) for model in models]
    run = Backtest.fresh(market, settings, sources, [], has_baselines=False)
    for followed in run.accounts:
        followed.limits = msgspec.structs.replace(followed.limits, **guard)
    for _ in run.run():
        if run.engine.is_due:
            await run.engine.invoke()
    marks = run.marks()
    return Stage(
        cause,
        equity={each.account.id: equity(each.account, marks) for each in run.accounts},
        trades={each.account.id: len(each.trades) for each in run.accounts},
        refused={
            each.account.id: Counter(outcome.rule for outcome in each.outcomes if outcome.rule) for each in run.accounts
        },
    )


def _require_same(recorded: RecordedRun, stage: Stage) -> None:
    for account in recorded.accounts:
        worth = stage.equity[account.id]
        if worth != account.equity:
            raise StartError(
                f"The decisions of {account.id} give an equity of {worth:f}, but {account.equity:f} was recorded: the "
                f"candles or the program have changed since (program {recorded.program} recorded it)."
            )


def _value(folder: Path, changes: Mapping[str, Any], recorded: RecordedRun, stages: Sequence[Stage]) -> dict[str, Any]:
    accounts = []
    for account in recorded.accounts:
        equities = [stage.equity[account.id] for stage in stages]
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
                "trades": {stage.cause: stage.trades[account.id] for stage in stages},
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
