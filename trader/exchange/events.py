"""Events of the exchange, and the log lines of completed trades."""

import logging
from datetime import datetime
from decimal import Decimal

from trader.core.events import Event
from trader.core.money import format_decimal, round_to
from trader.exchange.domain.account import Trade
from trader.exchange.domain.halts import Halt
from trader.exchange.domain.orders import Cause

log = logging.getLogger("trader.exchange")


class TradesChanged(Event, frozen=True):
    """A trade of these accounts was completed. `trades` are the ones that this process posted; a standby has none."""

    at: datetime
    account_ids: tuple[str, ...]
    trades: tuple[Trade, ...] = ()


class HaltsChanged(Event, frozen=True):
    """A halt came into force or was lifted; `halts` lists the halts now in force."""

    at: datetime
    halts: tuple[Halt, ...]


def log_trades(event: Event) -> None:
    """Log each completed trade that this process posted; a listener of the event bus."""
    if not isinstance(event, TradesChanged):
        return
    for trade in event.trades:
        level = logging.WARNING if trade.close_reason is Cause.LIQUIDATION else logging.INFO
        log.log(level, "closed by %s: %s", trade.close_reason, describe_trade(trade))


def describe_trade(trade: Trade) -> str:
    """Describe a completed trade in one line of text."""
    exit_price = round_to(trade.exit_price, Decimal("1e-8"))
    net = format_decimal(trade.net_pnl)
    return (
        f"{trade.account_id}: {trade.side} {format_decimal(trade.quantity)} {trade.symbol} "
        f"at {format_decimal(exit_price)}, net {net if net.startswith('-') else f'+{net}'}"
    )
