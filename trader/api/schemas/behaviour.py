"""Behavior on the wire: how the current entrant of a model trades."""

from typing import Annotated

from trader.api.schemas.analytics import Percent
from trader.api.schemas.common import From, Input, Timestamp, Wire
from trader.portfolio.behaviour import EntrantBehaviour
from trader.portfolio.domain.behaviour import HoldingTimes, PlanOutcome


class GetBehaviourInput(Input, kw_only=True):
    model_id: str


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
    time_in_market: Annotated[Percent | None, From("time_in_market_percent")]
    holding_times: HoldingTimes | None
    within_minute: int
    leverage_by_volatility: list[float] | None
    turnover: float | None
    fees: Annotated[Percent | None, From("fees_percent")]
    flips: int
    stops: PlanOutcome
    targets: PlanOutcome
    plans_changed: int
    captured: Annotated[Percent | None, From("captured_percent")]
    alike: Annotated[Percent | None, From("alike_percent")]
    replicates: list[str]

    @classmethod
    def of(cls, entrant: EntrantBehaviour) -> "BehaviourView":
        return cls.from_attributes(entrant.behaviour, entrant)


class GetBehaviourOutput(Wire, kw_only=True):
    """`behaviour` is null until the model has an account with a known entrant."""

    behaviour: BehaviourView | None
