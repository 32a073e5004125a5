"""The prompt: the system message of an entrant, and the view as JSON, in the order in which its parts change.

Providers keep the beginning of a prompt that they have seen before and charge a fraction for it. So what never changes
comes first (prompt, rules, glossary, the markets' own figures), then the candles, the longest interval first, then what
changes with a trade, and last what changes every minute. Candles are rows by time, all markets beside each other, and
the first row stays for several candles, so that a new candle is added at the end.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trader.clock import EPOCH, floor_time, iso
from trader.domain.agents.conversation import Message
from trader.domain.agents.tools import TOOL_SCHEMAS
from trader.domain.agents.view import ObservedMarket, ObservedPosition, ObservedTrade, VariantLimits, View
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import INTERVALS, Candle, Interval
from trader.domain.money import format_decimal

ROWS_MIN: Final = 9
ROWS_ADDED_MAX: Final = 8
"""Candles shown of an interval: at least `ROWS_MIN`, and up to so many more until the first row moves on."""

CANDLE_COLUMNS: Final = ("open", "high", "low", "close", "volume")
SESSION_FIELDS: Final = ("vwap", "vwapDeviation", "vwapUpper", "vwapLower")
"""The indicators of the UTC day, which are the same at every interval."""

MARKET_FIELDS: Final = ("tick", "lot", "minNotional", "leverageMax")
"""Fields of a market that never change."""

NOT_NOW: Final = frozenset({*MARKET_FIELDS, "symbol", "quotedAt", "candles", "indicators"})
"""Fields of a market that are elsewhere in the prompt; `stale` says whether the quote is too old."""

WHERE_KNOWN: Final = ("openInterest", "supplementary")
"""Fields that only some sources provide; they are left out where unknown."""

RATIOS: Final = ("drawdownPercent", "dayLossPercent")
MINUTE: Final = timedelta(minutes=1)

DIGITS_MAX: Final = 8
"""Significant digits of an amount; the books may have three times as many, of which each third one is a token."""

CANDLES_END: Final = ',"stats":'
"""The end of the part of a view that stays the same until a candle closes."""

INVALIDATION_CHARACTERS: Final = 120
"""Characters that the model is shown of its own invalidation text of a position."""

_AMOUNTS: Final = Context(prec=DIGITS_MAX)

_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")

CHARACTERS_PER_10_TOKENS: Final = 30
"""o200k takes 31 characters of a prompt for ten tokens; vocabularies with a token for each digit take fewer."""

_TOOLS_CHARACTERS: Final = len(msgspec.json.encode(TOOL_SCHEMAS))

GLOSSARY: Final = f"""## The data

JSON. Amounts are in the quote currency, quantities in base units; null: not known. `minute` counts from 1970-01-01
00:00 UTC. Tables begin with the names of their columns; candles are closed ones, oldest first, each
[{", ".join(CANDLE_COLUMNS)}] at the minute of its open; trades are newest first.
- `fundingRate`: hourly, part of the notional; at a positive one longs pay shorts, at a negative one shorts pay longs.
- `unrealized` is gross: before `fees` (positive: paid) and `funding` (negative: paid). `netPnl` is after both.
- `price` and `mark` are the mark price; `openInterest` is the notional of all open positions in the market.
- `reasons`: the minute of each of your last cycles, and what you said at its end."""


def opening_messages(prompt: str, limits: VariantLimits, view: View) -> list[Message]:
    """Return the system message of an entrant and the user message of this cycle."""
    system = f"{prompt.strip()}\n\n{rules_text(limits)}\n\n{GLOSSARY}\n\n{cadence_text(view.every_minutes)}"
    return [{"role": "system", "content": system}, {"role": "user", "content": view_text(view)}]


def rules_text(limits: VariantLimits) -> str:
    """Return the guard's rules with this variant's figures."""
    return f"""## Rules that are enforced

A guard refuses what breaks a rule, and you are told why.
- Leverage of a position: at most {limits.leverage_max}, and never above the market's own `leverageMax`.
- A position needs a stop. Stop and invalidationPrice lie on the losing side of the mark, the target on the winning one.
- One position is worth at most {limits.position_notional_max} × equity; all positions together at most \
{limits.leverage_max} × equity.
- No new position in a market whose `stale` is true; no decision over {limits.decision_age_max_s} s after this view.
- No reversal of a market within {limits.reversal_cycles} cycles of the last trade in it (`lastAction`), an exit by \
stop, target, time or liquidation included. A cycle is 60 seconds.
- After a loss of {limits.day_loss_max_percent} % of `dayOpeningEquity` only reducing is allowed until 00:00 UTC.

You act through the tools only; people read what you write. Call `holding` alone, to end the cycle."""


def estimated_tokens(messages: Sequence[Message]) -> int:
    """Return how many tokens a prompt with the tools has at most, for tokenizers that are in use, by its characters."""
    return (len(json_text(messages)) + _TOOLS_CHARACTERS) * 10 // CHARACTERS_PER_10_TOKENS


def cadence_text(every_minutes: int) -> str:
    """Return how often the model is asked."""
    often = "minute" if every_minutes == 1 else f"{every_minutes} minutes"
    return f"You are asked every {often}. Between two of your cycles only your exit plans act."


def view_text(view: View) -> str:
    """Return the view as JSON. Decimals have the digits of the books; an absent value is null."""
    markets = view.markets
    shown: dict[str, Any] = {
        "markets": {symbol: _part(market, MARKET_FIELDS) for symbol, market in markets.items()},
        **{interval: _interval_part(markets, interval, view.at) for interval in _intervals(markets)},
        "stats": _shortened(_plain(view.stats)),
        "trades": _trade_table(view.trades),
        "at": iso(view.at),
        "minute": minute_of(view.at),
        **({} if view.restriction is None else {"restriction": view.restriction}),
        "session": {symbol: _session(market) for symbol, market in markets.items()},
        "now": {symbol: _now(market) for symbol, market in markets.items()},
        "account": _plain(view.account) | _shortened(_part(view.account, RATIOS)),
        "positions": [_position(position) for position in view.positions],
        "orders": [_plain(order) for order in view.orders],
        "reasons": [[minute_of(reason.at), reason.text] for reason in view.reasons],
    }
    return json_text(shown)


def minute_of(moment: datetime) -> int:
    """Return the minutes since 1970-01-01 00:00 UTC."""
    return (moment - EPOCH) // MINUTE


@lru_cache(maxsize=4096)
def candle_values(candle: Candle) -> list[float]:
    """Return the values of a candle in the order of `CANDLE_COLUMNS`, as many digits as decide anything.

    Cached, since the models of a cycle share their candles, and the next cycle most of them.
    """
    return [*(significant(price, 6) for price in candle[1:5]), significant(candle.volume, 3)]


def indicator_values(indicators: Indicators) -> dict[str, Any]:
    """Return the indicators by name, to 6 significant digits."""
    values: dict[str, Any] = _shortened(msgspec.to_builtins(indicators))
    return values


def significant(value: float, digits: int) -> float:
    """Return the number with so many significant digits, a whole one without a fraction."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def json_text(value: Any) -> str:
    """Return the JSON of a message; decimals are numbers in it."""
    return _ENCODER.encode(value).decode()


def _intervals(markets: Mapping[str, ObservedMarket]) -> list[Interval]:
    """Return the intervals of the view, the longest first: its candles change least often."""
    shown = {interval for market in markets.values() for interval in market.candles}
    return sorted(shown, key=INTERVALS.__getitem__, reverse=True)


def _interval_part(markets: Mapping[str, ObservedMarket], interval: Interval, at: datetime) -> dict[str, Any]:
    """Return the candles of all markets at an interval as rows by time, and their indicators as columns."""
    span = INTERVALS[interval]
    first = floor_time(floor_time(at, span) - ROWS_MIN * span, ROWS_ADDED_MAX * span)
    rows: dict[datetime, list[Any]] = {}
    for place, market in enumerate(markets.values(), 1):
        for candle in market.candles.get(interval, ()):
            if candle.open_time >= first:
                row = rows.setdefault(candle.open_time, [minute_of(candle.open_time), *(None for _ in markets)])
                row[place] = candle_values(candle)
    values = [indicator_values(market.indicators[interval]) for market in markets.values()]
    return {
        "candles": [["minute", *markets], *(rows[moment] for moment in sorted(rows))],
        "indicators": {
            "columns": [*markets],
            **{name: [each[name] for each in values] for name in values[0] if name not in SESSION_FIELDS},
        },
    }


def _session(market: ObservedMarket) -> dict[str, Any]:
    """Return the indicators of the UTC day, from the interval that closed last."""
    shortest = min(market.indicators, key=INTERVALS.__getitem__)
    return _named(indicator_values(market.indicators[shortest]), SESSION_FIELDS)


def _now(market: ObservedMarket) -> dict[str, Any]:
    """Return the fields of a market that change every minute."""
    shown = _plain(replace(market, candles={}, indicators={}))
    absent = {name for name in WHERE_KNOWN if shown[name] is None}
    return {name: value for name, value in shown.items() if name not in NOT_NOW | absent}


def _position(position: ObservedPosition) -> dict[str, Any]:
    plan = position.exit_plan
    words = None if plan.invalidation is None else plan.invalidation[:INVALIDATION_CHARACTERS]
    shown: dict[str, Any] = _plain(replace(position, exit_plan=replace(plan, invalidation=words)))
    return shown


def _trade_table(trades: Sequence[ObservedTrade]) -> list[list[Any]]:
    names = [name for name in ObservedTrade.__struct_encode_fields__ if name not in ("openedAt", "closedAt")]
    rows = [
        [minute_of(trade.opened_at), minute_of(trade.closed_at), *_shortened(_named(_plain(trade), names)).values()]
        for trade in trades
    ]
    return [["openedMinute", "closedMinute", *names], *rows]


def _part(value: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    return _named(_plain(value), names)


def _named(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _shortened(value: Any) -> Any:
    """Return the value with its numbers to 6 significant digits."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return significant(float(value), 6) if isinstance(value, float | Decimal) else value


def _plain(value: Any) -> Any:
    """Return a struct as JSON values, decimals in plain digits (10000 for 1E+4), at most `DIGITS_MAX` of them."""
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.to_builtins(value, builtin_types=(Decimal,)))
    if isinstance(value, Decimal):
        return Decimal(format_decimal(value.normalize(_AMOUNTS)))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
