"""Run of a backtest: its parts, built from settings and models, and the result of each model.

`compare_conditions` runs recorded decisions again, with other fees, another latency or other limits of the guard.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import Model, ModelConfiguration, rule_model
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import DecisionSource, ModelAccount, open_model_account
from trader.backtest.baselines import BaselineAccount, open_baselines
from trader.backtest.engine import Engine, Journal, run_together
from trader.backtest.market import BacktestMarket
from trader.backtest.sources import (
    AiSource,
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
from trader.core.statistics import EquityPoint
from trader.core.variant_id import VariantId
from trader.exchange.domain.account import Marks, Trade, equity, unrealized
from trader.exchange.domain.ledger import ExchangeRules, Posting
from trader.exchange.protocol import rules_of
from trader.portfolio.domain.behaviour import is_within_minute
from trader.portfolio.domain.histories import Snapshot, hourly_points
from trader.portfolio.tables import Table
from trader.seasons.sql.report import AccountReport
from trader.settings.settings import Settings


class RunJournal(Journal, Protocol):
    """Journal of a whole backtest."""

    def open(self, followed: ModelAccount) -> None:
        """Receive a newly opened account."""
        ...


class Sums:
    """An account's totals of its fills, its closed trades, and the notional of its largest execution in each market."""

    def __init__(self) -> None:
        self.fees = self.liquidation_fees = ZERO
        self.trades: list[Trade] = []
        self.largest: dict[str, Decimal] = {}

    def add(self, posting: Posting) -> None:
        self.fees += sum((fill.fee for fill in posting.fills), ZERO)
        self.liquidation_fees += sum((fill.liquidation_fee for fill in posting.fills), ZERO)
        self.trades += posting.trades
        executed: defaultdict[str, Decimal] = defaultdict(Decimal)
        for fill in posting.fills:
            executed[fill.symbol] += fill.quantity * fill.price
        for symbol, notional in executed.items():
            self.largest[symbol] = max(notional, self.largest.get(symbol, ZERO))


class _Observed:
    """Journal that forwards everything to other journals, and keeps totals per account."""

    def __init__(self, journals: Sequence[RunJournal]) -> None:
        self._journals = journals
        self.sums: dict[str, Sums] = {}

    def open(self, followed: ModelAccount) -> None:
        self.sums[followed.account.id] = Sums()
        for journal in self._journals:
            journal.open(followed)

    def post(self, posting: Posting) -> None:
        self.sums[posting.account.id].add(posting)
        for journal in self._journals:
            journal.post(posting)

    def snapshot(self, snapshot: Snapshot) -> None:
        for journal in self._journals:
            journal.snapshot(snapshot)


class _Unbooked:
    """Journal of the baselines: forwards their snapshots and drops their postings, which belong to no ledger."""

    def __init__(self, journals: Sequence[Journal]) -> None:
        self._journals = journals

    def post(self, posting: Posting) -> None:
        pass

    def snapshot(self, snapshot: Snapshot) -> None:
        for journal in self._journals:
            journal.snapshot(snapshot)


class Backtest:
    """A backtest over an open source. `run` may be stopped early; the results until then are valid."""

    def __init__(
        self,
        market: BacktestMarket,
        rules: ExchangeRules,
        accounts: Sequence[ModelAccount],
        baselines: Sequence[BaselineAccount],
        journals: Sequence[RunJournal],
    ) -> None:
        self.market, self.rules = market, rules
        self.starts_at, self.ends_at = moment_of(market.span.start), moment_of(market.span.stop - 1)
        self._reached = market.span.start
        self._observed = _Observed(journals)
        self.accounts, self.baselines = accounts, baselines
        for followed in self.accounts:
            self._observed.open(followed)
        self._engine = Engine(market, rules, self.accounts, self._observed)
        self._engines = self._engine, Engine(market, rules, self.baselines, _Unbooked(journals))

    @classmethod
    def fresh(
        cls,
        market: BacktestMarket,
        settings: Settings,
        models: Sequence[tuple[Model, DecisionSource]],
        journals: Sequence[RunJournal],
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
        for second in run_together(self.market, self._engines):
            self._reached = min(second, self.market.span.stop - 1)
            yield moment_of(self._reached)

    async def invoke(self) -> None:
        """Run the invocations that are due at the time reached, and raise the error of the first that failed."""
        await self._engine.invoke()

    @property
    def is_due(self) -> bool:
        """Whether an invocation is due at the time reached."""
        return self._engine.is_due

    def skip(self) -> None:
        """Skip the invocations that are due at the time reached."""
        self._engine.skip()

    @property
    def reached(self) -> datetime:
        """The time reached."""
        return moment_of(self._reached)

    @property
    def is_ahead(self) -> bool:
        """Whether an invocation has advanced an account beyond the time reached."""
        return self._engine.is_ahead(self._reached)

    @property
    def failure(self) -> StrategyError | None:
        """The failure of a strategy, which has decided nothing since; None if none has failed."""
        sources = (each.source for each in self.accounts if isinstance(each.source, RecordingStrategySource))
        return next((each.failure for each in sources if each.failure is not None), None)

    def marks(self) -> Marks:
        """Return the marks at the time reached."""
        return self.market.marks(self._reached)

    def reports(self) -> list[AccountReport]:
        """Return the result of each account at the time reached, valued at the current marks."""
        return [self._report(followed) for followed in self.accounts]

    def _report(self, followed: ModelAccount) -> AccountReport:
        account, sums = followed.account, self._observed.sums[followed.account.id]
        marks = self.marks()
        return AccountReport(
            model_id=followed.model.id,
            name=followed.model.name,
            variant=followed.model.variant.value,
            initial_capital=account.run.initial_capital,
            started_at=account.run.started_at,
            at=moment_of(self._reached),
            equity=equity(account, marks),
            unrealized=unrealized(account, marks),
            gross=account.realized,
            fees=sums.fees,
            liquidation_fees=sums.liquidation_fees,
            funding=account.funding,
            insurance=account.insurance,
            model_cost=followed.source.cost_usd if isinstance(followed.source, AiSource) else None,
            invocations=followed.decisions,
            trades=len(sums.trades),
            within_minute=sum(is_within_minute(each.opened_at, each.closed_at) for each in sums.trades),
        )

    def equity_hours(self) -> dict[str, list[EquityPoint]]:
        """Return the last equity of each hour of each account."""
        return {each.account.id: hourly_points(each.hours) for each in self.accounts}

    def trades(self, followed: ModelAccount) -> Sequence[Trade]:
        """Return the completed trades of an account, in order of closing."""
        return self._observed.sums[followed.account.id].trades

    @property
    def series(self) -> Table:
        """The own series of the strategy file, of which a backtest has at most one."""
        sources = (each.source for each in self.accounts if isinstance(each.source, RecordingStrategySource))
        return next((each.series for each in sources if len(each.series)), Table("series"))

    def largest_executions(self) -> Mapping[str, Decimal]:
        """Return the largest notional that one account executed at once in each market."""
        accounts = self._observed.sums.values()
        return {
            symbol: max((sums.largest.get(symbol, ZERO) for sums in accounts), default=ZERO)
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
