"""A sitting: every entrant decides in the same state, by the kernel, guard and exchange of the backtest.

What an account holds after its decision, or through the steps of a managed world, is valued by the law of the world;
see `docs/exam.md`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from trader.agents.domain.models import Model
from trader.backtest.accounts import DecisionSource, ModelAccount, model_account
from trader.backtest.advance import Journal
from trader.backtest.market import BacktestMarket
from trader.backtest.run import Backtest
from trader.backtest.sources import (
    AiSource,
    RecordedInvocation,
    RecordingStrategySource,
    ReplayedDecisions,
    WorkflowSource,
)
from trader.core.clock import epoch_second, moment_of
from trader.core.errors import SettingsError
from trader.core.money import floor_to, from_number, require_figure
from trader.core.statistics import Floats
from trader.exam.domain.law import GAIN_MAX, HORIZON, RISK_BUDGET, SIZE_MAX, PlannedPosition, credited
from trader.exam.domain.managed import MINUTES, STEP_MINUTES, STEPS, Course, PricedFill, Valued
from trader.exam.domain.scores import Scored
from trader.exam.domain.worlds import AFTER, RECENT, USUAL_VALUE, FillCosts, World, standing_weight
from trader.exam.source import WorldPast
from trader.exchange.domain import rules as exchange
from trader.exchange.domain.account import Account, Position, equity, liquidation_price
from trader.exchange.domain.ledger import ExchangeRules, Posting, unopened_account
from trader.exchange.domain.orders import ExitPlan, Fill, Order, OrderSide
from trader.exchange.protocol import rules_of
from trader.market.domain.markets import Interval, SimulatedMarket
from trader.settings.settings import Settings

EVERY: Final = "4h"
"""The cadence of entrants who decide once. States fall on these hours."""

EVERY_STEP: Final = f"{STEP_MINUTES}m"
"""The cadence of entrants in managed worlds."""

_REACH_S: Final = 122
"""Seconds after an order's latency in which its book comes, however late the guard still takes the order."""

_STANDING_STOP: Final = 12.0
"""How many deviations of the horizon the stop of a standing position is away."""

_STANDING_LEVERAGE: Final = Decimal(2)

_RECORDING: Final = (WorkflowSource, RecordingStrategySource, ReplayedDecisions)

SourceOf = Callable[[Model, datetime], DecisionSource]
"""Makes a new decision source, without memory, for a model; the time is the end of the state."""


class Examinee(NamedTuple):
    """An entrant of an exam: a model, and the factory of its decision source in each state."""

    model: Model
    source_of: SourceOf


class ExamAnswer(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An entrant's decisions and text in a state, the rules that refused them with a reason of each, and the cost of
    its answers."""

    decided: tuple[RecordedInvocation, ...] = ()
    refused: tuple[str, ...] = ()
    reasons: dict[str, str] = {}
    cost_usd: Decimal | None = None
    tokens: Annotated[int, msgspec.Meta(ge=0, le=10**12)] = 0
    said: str | None = None

    def __post_init__(self) -> None:
        require_figure(self.cost_usd)


class Sitting(Scored, frozen=True, kw_only=True, rename="camel"):
    """A decision and its score, with the answer."""

    answer: ExamAnswer


class Standing(NamedTuple):
    """The position that every account holds before its decision: its market, side, notional as a fraction of equity,
    and the log distance of its stop."""

    symbol: str
    side: int
    weight: float
    stop: float


class _Fills(Journal):
    """Journal that keeps the fills of each account."""

    def __init__(self) -> None:
        self.by_account: defaultdict[str, list[Fill]] = defaultdict(list)

    def post(self, posting: Posting) -> None:
        self.by_account[posting.account.id] += posting.fills


class DecidedAccount(NamedTuple):
    """An entrant after its decision: its account before, with a standing position, its account, and its fills."""

    before: Account
    followed: ModelAccount
    fills: Sequence[Fill]

    def equity(self, market: BacktestMarket, world: World) -> float:
        """Return its equity in the state of a world, before its decision."""
        return float(equity(self.before, market.marks(world.state)))

    @property
    def answer(self) -> ExamAnswer:
        """The calls, the text, and the cost of the answers."""
        followed = self.followed
        source, records = followed.source, followed.finished or []
        recorded = source.recorded if isinstance(source, _RECORDING) else []
        return ExamAnswer(
            refused=tuple(each.rule or each.status for each in followed.outcomes if each.status != "ok"),
            reasons={each.rule or each.status: each.reason for each in followed.outcomes if each.reason is not None},
            decided=tuple(recorded),
            cost_usd=source.cost_usd if isinstance(source, AiSource) else None,
            tokens=sum(each.invocation.input_tokens + each.invocation.output_tokens for each in records),
            said=next((each.invocation.response for each in records), None),
        )


async def decide(
    market: BacktestMarket,
    settings: Settings,
    entrants: Sequence[Examinee],
    state: int,
    standing: Standing | None,
    horizon: int = HORIZON,
    steps: int = 1,
) -> list[DecidedAccount]:
    """Let every entrant decide at the second `state`, and at each further step, and advance the accounts to the end of
    the market.

    Their views say that they are asked again after `horizon` minutes, and they are until they have decided in all
    `steps`.

    :raises AskingEnded: no model can be asked any more
    :raises StrategyError: a strategy failed
    """
    rules, fills = rules_of(settings, market.markets), _Fills()
    accounts = [_account(market, rules, settings, entrant, standing) for entrant in entrants]
    for followed in accounts:
        followed.cadence = timedelta(minutes=horizon)
    before, times = [each.account for each in accounts], range(state, state + 60 * steps * horizon, 60 * horizon)
    run = Backtest(market, rules, accounts, (), [fills])
    for _ in run.run():
        if run.engine.is_due:
            await run.engine.invoke()
        for followed in accounts:
            if followed.decides_at not in times:
                followed.decides_at = None
    if run.failure is not None:
        raise run.failure
    return [
        DecidedAccount(account, followed, fills.by_account[account.id])
        for account, followed in zip(before, accounts, strict=True)
    ]


def _account(
    market: BacktestMarket, rules: ExchangeRules, settings: Settings, entrant: Examinee, standing: Standing | None
) -> ModelAccount:
    """Return the account of an entrant: flat, or with the standing position."""
    model, begin = entrant.model, market.span.start
    account = unopened_account(model.id, settings.initial_capital, settings.quote_currency, moment_of(begin))
    account = replace(account, sequence=1)
    if standing is not None:
        order = _standing_order(standing, market, account)
        account = exchange.place(account, order, market.moment(begin), rules, market.funding_rate).account
    source = entrant.source_of(model, moment_of(market.span.stop - 1))
    followed = model_account(model, source, settings, account)
    followed.finished = []
    return followed


def _standing_order(standing: Standing, market: BacktestMarket, account: Account) -> Order:
    mark, rules = market.mark(standing.symbol, market.span.start), market.markets[standing.symbol]
    return Order(
        account_id=account.id,
        symbol=standing.symbol,
        side=OrderSide.BUY if standing.side > 0 else OrderSide.SELL,
        quantity=floor_to(account.cash * from_number(standing.weight) / mark, rules.lot),
        leverage=_STANDING_LEVERAGE,
        exit_plan=ExitPlan(
            stop=floor_to(mark * from_number(math.exp(-standing.side * standing.stop)), rules.tick),
            invalidation="the trend of the last hours turns",
        ),
    )


class WorldRoom:
    """The room of an exam in worlds, managed ones or others: the markets and settings that all worlds share.

    :raises SettingsError: orders take longer than worlds last
    """

    def __init__(
        self,
        settings: Settings,
        rows: Mapping[str, SimulatedMarket],
        intervals: Collection[Interval],
        *,
        is_managed: bool = False,
    ) -> None:
        self._settings, self.is_managed = settings, is_managed
        self._rows = tuple(rows.values())
        self._intervals = intervals
        rules = rules_of(settings, {symbol: row.rules for symbol, row in rows.items()})
        self.costs = FillCosts(self._rows, [float(rules.fee_rate(symbol, maker=False)) for symbol in rows])
        self._reach_s = math.ceil(rules.latency.total_seconds()) + _REACH_S
        if self._reach_s > (AFTER - 1) * 60:
            raise SettingsError([f"--latency is {settings.latency_ms}; orders of an exam take at most 58000 ms"])

    async def sit(self, world: World, entrants: Sequence[Examinee]) -> list[Sitting]:
        """Let every entrant decide in the state of a world, and score the decisions. Raise like `decide`."""
        reach_s, shown, horizon, steps = self._reach_s, 0, HORIZON, 1
        if self.is_managed:
            reach_s, shown, horizon, steps = MINUTES * 60 + 1, MINUTES, STEP_MINUTES, STEPS
        market = await BacktestMarket.open(WorldPast(world, self._rows, reach_s, shown), self._intervals)
        decided = await decide(market, self._settings, entrants, world.state, self._standing(world), horizon, steps)
        filling = self._filling(market, world)
        if not self.is_managed:
            return [self._scored(world, market, each, filling) for each in decided]
        closes = np.array([bars.close[RECENT - 1 : RECENT + MINUTES] for bars in world.recent])
        law = world.law
        course = Course(closes / closes[:, :1], law.drift, law.funding, filling, law.horizon_deviation)
        stood = _held(decided[0].before, world, market, decided[0].equity(market, world))
        best = course.oracle(stood)
        return [
            _sitting(world, each, course.judge(_trades(each, market, world), stood, USUAL_VALUE), best)
            for each in decided
        ]

    def _standing(self, world: World) -> Standing | None:
        if not world.standing:
            return None
        market = world.stands_in
        far = _STANDING_STOP * float(world.law.horizon_deviation[market])
        return Standing(world.symbols[market], world.standing, standing_weight(self.costs, market), far)

    def _scored(self, world: World, market: BacktestMarket, decided: DecidedAccount, filling: Floats) -> Sitting:
        """Return the score of what the account holds after its decision, and of what that cost."""
        own, law, accounts = decided.equity(market, world), world.law, (decided.before, decided.followed.account)
        stood, held = (_held(account, world, market, own) for account in accounts)
        value = law.value(held) - law.value(stood) - sum(each.cost for each in _trades(decided, market, world))
        risk = law.risk(held, stood)
        judged = Valued(value, credited(value, risk, USUAL_VALUE), risk)
        return _sitting(world, decided, judged, law.oracle(filling, stood).value)

    def _filling(self, market: BacktestMarket, world: World) -> Floats:
        """Return what a small fill costs in each market in the state: the taker fee and half the spread."""
        quotes = [market.quote(symbol, world.state) for symbol in world.symbols]
        return np.array(self.costs.taker) + [float((each.ask - each.bid) / (2 * each.mark)) for each in quotes]


def _sitting(world: World, decided: DecidedAccount, judged: Valued, oracle: float) -> Sitting:
    """Return the score of what an entrant decided in a world."""
    answer = decided.answer
    if judged.risk > SIZE_MAX * RISK_BUDGET:
        limit = f"the limit is {100 * SIZE_MAX * RISK_BUDGET:.1f} %"
        why = f"a deviation of {100 * judged.risk:.1f} % of equity over four hours; {limit}"
        reasons = answer.reasons | {"risk budget": why}
        answer = replace(answer, refused=(*answer.refused, "risk budget"), reasons=reasons)
    return Sitting(
        state=world.number,
        entrant=decided.before.id,
        edge=world.edge,
        kind=world.kind,
        value=judged.value,
        risk=judged.risk,
        score=judged.score,
        oracle=min(oracle, GAIN_MAX * USUAL_VALUE),
        answer=answer,
    )


def _trades(decided: DecidedAccount, market: BacktestMarket, world: World) -> list[PricedFill]:
    """Return the fills of an account. A fill costs its fees, and its distance from the mark."""
    own, marks, trades = decided.equity(market, world), market.marks(world.state), []
    for fill in decided.fills:
        second, direction = epoch_second(fill.at), 1 if fill.side is OrderSide.BUY else -1
        away = direction * (fill.price - market.mark(fill.symbol, second)) * fill.quantity
        weight = direction * float(fill.quantity * marks[fill.symbol]) / own
        cost = float(fill.fee + fill.liquidation_fee + away) / own
        trades.append(PricedFill((second - world.state) / 60, world.symbols.index(fill.symbol), weight, cost))
    return trades


def _held(account: Account, world: World, market: BacktestMarket, own: float) -> tuple[PlannedPosition, ...]:
    """Return the positions of an account with this equity as the law values them."""
    marks = market.marks(world.state)
    held: list[PlannedPosition] = []
    for symbol, position in account.positions.items():
        mark, ruin = float(marks[symbol]), liquidation_price(account, symbol, marks, market.markets)
        held += [_part(position, quantity, goals, world, mark, own, ruin) for quantity, goals in _parts(position)]
    return tuple(held)


def _parts(position: Position) -> Iterator[tuple[Decimal, list[Decimal]]]:
    """Yield the parts of a position by the prices that take their profit: one for each target, and the rest."""
    plan, rest = position.exit_plan, position.quantity
    goals = [] if plan.target is None else [plan.target]
    for target in plan.targets if position.closing is None else ():
        rest -= target.quantity
        yield target.quantity, [target.price, *goals]
    if rest:
        yield rest, goals


def _part(
    position: Position, quantity: Decimal, goals: Sequence[Decimal], world: World, mark: float, own: float,
    ruin: Decimal | None,
) -> PlannedPosition:  # fmt: skip
    """Return a part of a position with the prices that take its profit. A trailing stop stands where it is."""
    plan, is_long = position.exit_plan, position.is_long
    adverse = [float(price) for price in (plan.stop, plan.invalidation_price, ruin) if price is not None]
    favorable = list(map(float, goals))
    lower, upper = (adverse, favorable) if is_long else (favorable, adverse)
    minutes = HORIZON
    if position.closing is not None:
        minutes = 0
    elif plan.time_exit is not None:
        minutes = max(0, min(HORIZON, math.ceil((plan.time_exit - moment_of(world.state)).total_seconds() / 60)))
    return PlannedPosition(
        world.symbols.index(position.symbol),
        1 if is_long else -1,
        float(quantity) * mark / own,
        max((math.log(price / mark) for price in lower), default=-math.inf),
        min((math.log(price / mark) for price in upper), default=math.inf),
        minutes,
    )
