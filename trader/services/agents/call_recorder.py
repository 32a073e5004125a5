"""What a call met, noted while it is executed, so that it can be executed again."""

from collections.abc import Mapping
from datetime import datetime

from trader.domain.agents.guard import RiskContext
from trader.domain.agents.reproduction import CallInputs, FundingRate, RecordedQuote, RecordedUpdate
from trader.domain.agents.view import VariantLimits
from trader.domain.exchange.account import hours_crossed
from trader.domain.exchange.ledger import Rules
from trader.domain.market.markets import Quote
from trader.services.market.feed import MarketFeed


class CallRecorder:
    """Of one call: from the moment of its context to its answer."""

    def __init__(self, market: MarketFeed, rules: Rules, latency_ms: int, context: RiskContext) -> None:
        self._market = market
        self._rules = rules
        self._latency_ms = latency_ms
        self._context = context
        self._quotes = dict(market.quotes())
        latest = market.recent()
        self._last = latest[-1] if latest else None

    def refused(self, number: int, limits: VariantLimits) -> CallInputs:
        """The inputs of a call that the guard refused: it met no book."""
        return CallInputs(
            number=number,
            limits=limits,
            rules=self._rules,
            latency_ms=self._latency_ms,
            context=self._context,
            answered_at=self._context.now,
        )

    def answered(self, number: int, limits: VariantLimits, symbol: str, at: datetime) -> CallInputs:
        """The inputs of a call that reached the exchange and was answered at `at`."""
        account = self._context.account
        concerned = {symbol, *account.positions, *(order.symbol for order in account.resting)}
        latest = self._market.recent()
        first = next((n for n, tick in enumerate(latest, 1) if tick is self._last), 0)
        return CallInputs(
            number=number,
            limits=limits,
            rules=self._rules,
            latency_ms=self._latency_ms,
            context=self._context,
            answered_at=at,
            quotes=_shown(self._quotes, concerned),
            updates=tuple(RecordedUpdate(tick.at, _shown(tick.quotes, concerned)) for tick in latest[first:]),
            rates=tuple(
                FundingRate(held, hour, self._market.funding_rate(held, hour))
                for held, position in account.positions.items()
                for hour in hours_crossed(position.funded_until, at)
            ),
        )


def _shown(quotes: Mapping[str, Quote], symbols: set[str]) -> tuple[RecordedQuote, ...]:
    return tuple(RecordedQuote.of(quote) for symbol, quote in quotes.items() if symbol in symbols)
