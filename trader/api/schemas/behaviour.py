"""Behavior on the wire: how the current entrant of a model trades."""

from trader.api.schemas.analytics import Percent
from trader.api.schemas.common import Input, Timestamp, Wire
from trader.portfolio.behaviour import EntrantBehaviour


class GetBehaviourInput(Input, kw_only=True):
    model_id: str


class HoldingTimesView(Wire, kw_only=True):
    """Quantiles of the holding times of completed positions, in minutes: 10, 50 and 90 %."""

    low: float
    median: float
    high: float


class PlanOutcomeView(Wire, kw_only=True):
    """Close reasons of the completed positions that had a stop (or a target) at the end."""

    planned: int
    by_stop: int
    by_target: int
    by_decision: int
    otherwise: int


class BehaviourView(Wire, kw_only=True):
    """How an entrant trades, from `since` until `until`: positions that it opened itself.

    `timeInMarket` is the share of time with a position, in percent. `withinMinute` counts the completed positions held
    for less than a minute: in a replay of candles their results depend on drawn prices. `leverageByVolatility` is its
    mean leverage in six equal groups of hours by the volatility of the preceding 24 hours, calmest first; null for
    under 60 hours. `turnover` is the traded notional divided by the equity at the start, `fees` are in percent of the
    gross gains, `flips` counts entries on the opposite side within an hour of a close, and `plansChanged` positions
    with a changed exit plan. `captured` is the gross profit in percent of the completed positions' largest unrealized
    gains. `alike` is the share of the time in which either of two of its `replicates` held a market that both held the
    same side, in percent.
    """

    since: Timestamp
    until: Timestamp
    positions: int
    time_in_market: Percent | None
    holding_times: HoldingTimesView | None
    within_minute: int
    leverage_by_volatility: list[float] | None
    turnover: float | None
    fees: Percent | None
    flips: int
    stops: PlanOutcomeView
    targets: PlanOutcomeView
    plans_changed: int
    captured: Percent | None
    alike: Percent | None
    replicates: list[str]

    @classmethod
    def of(cls, entrant: EntrantBehaviour) -> "BehaviourView":
        behaviour = entrant.behaviour
        times, leverage = behaviour.holding_times, behaviour.leverage_by_volatility
        return cls.from_attributes(
            behaviour,
            since=entrant.since,
            until=entrant.until,
            time_in_market=behaviour.time_in_market_percent,
            holding_times=None if times is None else HoldingTimesView.from_attributes(times),
            leverage_by_volatility=None if leverage is None else list(leverage),
            fees=behaviour.fees_percent,
            stops=PlanOutcomeView.from_attributes(behaviour.stops),
            targets=PlanOutcomeView.from_attributes(behaviour.targets),
            captured=behaviour.captured_percent,
            alike=behaviour.alike_percent,
            replicates=list(entrant.replicates),
        )


class GetBehaviourOutput(Wire, kw_only=True):
    """`behaviour` is null until the model has an account with a known entrant."""

    behaviour: BehaviourView | None
