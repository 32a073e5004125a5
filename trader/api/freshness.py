"""What the kept answers of procedures depend on. Each function gives a token; None: keep nothing now.

Accounts, models and snapshots count their changes, and marks are compared themselves. What is read from the database
depends on the second too: snapshots and trades leave a window as time goes on, and a script may have written models.
"""

from datetime import datetime

from trader.api.context import Context

Token = object | None


def of_prices(context: Context) -> Token:
    """Prices, as long as each is fresh: a stale one tells its age."""
    now, quotes = context.clock.now(), tuple(context.market.quotes().values())
    return None if any(quote.is_stale(now) for quote in quotes) else (quotes, context.market.troubles())


def of_positions(context: Context) -> Token:
    """What accounts hold, valued at the marks."""
    exchange = context.exchange
    return exchange.version, context.agents.version, *exchange.marks().items()


def of_trades(context: Context) -> Token:
    """Completed trades with the names of their models."""
    if context.exchange.term is None:  # another process writes
        return None
    return context.exchange.version, context.agents.version, _second(context)


def of_histories(context: Context) -> Token:
    """Snapshots by variant."""
    if context.exchange.term is None:
        return None
    return context.portfolio.version, context.agents.version, _second(context)


def of_rankings(context: Context) -> Token:
    """Snapshots, trades, and what accounts are worth now."""
    if context.exchange.term is None:
        return None
    return context.portfolio.version, _second(context), of_positions(context)


def _second(context: Context) -> datetime:
    return context.clock.now().replace(microsecond=0)
