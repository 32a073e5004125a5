"""The prompt: the system message of an entrant and the view as JSON, ordered by how often their parts change.

Providers cache the beginning of a prompt and charge a fraction for it when it recurs. So the constant parts come first
(prompt, rules, glossary, fixed figures of the markets), then the candles, the longest interval first, then everything
that changes with a trade, and last everything that changes every minute. Candles are rows by time, with all markets
side by side. Candles and decisions are listed oldest first; the first one stays for a while, and new ones are appended.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trader.agents.domain.conversation import ChatMessage
from trader.agents.domain.memory import DECISIONS_ADDED_MAX, DECISIONS_SHOWN
from trader.agents.domain.tools import tool_schemas
from trader.agents.domain.view import SERIES_SHOWN, ObservedMarket, ObservedPosition, ObservedTrade, VariantLimits, View
from trader.core.clock import floor_time, iso
from trader.core.money import format_decimal
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import INTERVALS, Candle, Interval

ROWS_MIN: Final = 8
ROWS_ADDED_MAX: Final = 4
"""Candles shown per interval: at least `ROWS_MIN`, and up to this many more until the first row advances."""

CANDLE_COLUMNS: Final = ("open", "high", "low", "close", "volume")
SESSION_FIELDS: Final = ("vwap", "vwapDeviation", "vwapUpper", "vwapLower")
"""The indicators of the UTC day, which are equal for all intervals."""

MARKET_FIELDS: Final = ("tick", "lot", "minNotional", "leverageMax")
"""Fields of a market that never change."""

NOT_NOW: Final = frozenset({*MARKET_FIELDS, "symbol", "quotedAt", "candles", "indicators", "indicatorHistory"})
"""Fields of a market that appear elsewhere in the prompt; `stale` says whether the quote is too old."""

WHERE_KNOWN: Final = ("openInterest", "supplementary")
"""Fields that only some sources provide; they are omitted if unknown."""

INDICATOR_NAMES: Final = tuple(name for name in Indicators.__struct_encode_fields__ if name != "close")
"""Names of the indicators in a prompt, without the close, which the candles contain."""

RATIOS: Final = ("drawdownPercent", "dayLossPercent")
DIGITS_MAX: Final = 8
"""Significant digits of an amount. The books may have three times as many, and every three digits cost a token."""

CANDLES_END: Final = ',"stats":'
"""The end of the part of a view that stays the same until a candle closes."""

INVALIDATION_CHARACTERS: Final = 70
"""Maximum characters shown of the model's own invalidation text of a position."""

_AMOUNTS: Final = Context(prec=DIGITS_MAX)

_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")

CHARACTERS_PER_10_TOKENS: Final = 30
"""With o200k, ten tokens cover 31 characters of a prompt; with vocabularies that have a token per digit, fewer."""

GLOSSARY: Final = f"""## The data

JSON. Times are ISO 8601 in UTC, amounts in the quote currency, quantities in base units; null: not known. Lists of
markets are in the order of `markets`. Candles are closed ones, oldest first, each
[{", ".join(CANDLE_COLUMNS)}]; the first row opened at `from`, and each further one an interval later.
Indicators are the last {SERIES_SHOWN} values, oldest first, or the last one alone; `fetchIndicators` has further ones.
Tables begin with the names of their columns; trades are newest first.
- `fundingRate`: hourly, part of the notional; at a positive one longs pay shorts, at a negative one shorts pay longs.
- `unrealized` is gross: before `fees` (positive: paid) and `funding` (negative: paid). `netPnl` is after both.
- `price` and `mark` are the mark price; `openInterest` is the notional of all open positions in the market.
- `decisions`: your last ones, oldest first. `refused`: calls of your last cycle that were refused or failed, and why.
  `note`: what you wrote to yourself by the tool of this name."""


def opening_messages(prompt: str, limits: VariantLimits, view: View) -> list[ChatMessage]:
    """Return the system message of an entrant and the user message of this cycle."""
    system = f"{prompt.strip()}\n\n{rules_text(limits)}\n\n{GLOSSARY}\n\n{cadence_text(view.every_minutes)}"
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": view_text(view, named_indicators(prompt))},
    ]


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

You act through the tools only; people read what you write. Call `holding` last, to end the cycle."""


def estimated_tokens(messages: Sequence[ChatMessage], symbols: tuple[str, ...]) -> int:
    """Return the maximum number of tokens of a prompt with the tools of these markets, from its number of characters.

    The bound holds for the tokenizers in use.
    """
    characters = len(json_text(messages)) + len(json_text(tool_schemas(symbols)))
    return characters * 10 // CHARACTERS_PER_10_TOKENS


def cadence_text(every_minutes: int) -> str:
    """Say how often the model is asked."""
    often = "minute" if every_minutes == 1 else f"{every_minutes} minutes"
    return f"You are asked every {often}. Between two of your cycles only your exit plans act."


def named_indicators(prompt: str) -> list[str]:
    """Return the indicators that a prompt names in backticks, or all if it names none."""
    named = set(re.findall(r"`(\w+)`", prompt))
    return [name for name in INDICATOR_NAMES if name in named] or list(INDICATOR_NAMES)


def view_text(view: View, names: Collection[str] = INDICATOR_NAMES) -> str:
    """Return the view as JSON, with the indicators of these names. An absent value is null."""
    markets = view.markets
    plain = {  # candles and indicators, the bulk of a market, are shown in columns
        symbol: _plain(replace(market, candles={}, indicators={}, indicator_history={}))
        for symbol, market in markets.items()
    }
    shown: dict[str, Any] = {
        "markets": {symbol: _named(market, MARKET_FIELDS) for symbol, market in plain.items()},
        **{interval: _interval_part(markets, interval, view.at, names) for interval in _intervals(markets)},
        "stats": _shortened(_plain(view.stats)),
        "trades": _trade_table(view.trades),
        "note": view.memory.note,
        "decisions": _decisions(view),
        "at": minute_text(view.at),
        **({} if view.restriction is None else {"restriction": view.restriction}),
        "refused": view.memory.refused,
        "session": _session(markets.values(), names),
        "now": {symbol: _now(market) for symbol, market in plain.items()},
        "account": _plain(view.account) | _shortened(_part(view.account, RATIOS)),
        "positions": _position_table(view.positions),
        "orders": [_plain(order) for order in view.orders],
    }
    return json_text(shown)


def minute_text(moment: datetime) -> str:
    """Return a time to the minute in ISO 8601 and UTC, as everywhere in a prompt."""
    return iso(moment)[:16] + "Z"


def candle_rows(series: Sequence[Sequence[Candle]], first: datetime, span: timedelta) -> dict[str, Any]:
    """Return the candles of several markets from `first` on as rows, one per interval, null if missing."""
    rows: list[list[Any]] = []
    for place, candles in enumerate(series):
        for candle in candles:
            row = (candle.open_time - first) // span
            if row >= 0:
                rows += [[None] * len(series) for _ in range(row + 1 - len(rows))]
                rows[row][place] = candle_values(candle)
    return {"from": minute_text(first), "candles": rows}


@lru_cache(maxsize=4096)
def candle_values(candle: Candle) -> list[float]:
    """Return the values of a candle in the order of `CANDLE_COLUMNS`, to as many digits as matter.

    Cached, since the models of a cycle share their candles, and successive cycles share most of them.
    """
    return [*(significant(price, 6) for price in candle[1:5]), significant(candle.volume, 3)]


def indicator_values(indicators: Indicators) -> dict[str, Any]:
    """Return the indicators by name, to 6 significant digits."""
    values: dict[str, Any] = _shortened(msgspec.to_builtins(indicators))
    return values


def significant(value: float, digits: int) -> float:
    """Return the number to this many significant digits, a whole number without a fraction."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def json_text(value: Any) -> str:
    """Return the JSON of a message, with decimals as numbers."""
    return _ENCODER.encode(value).decode()


def _intervals(markets: Mapping[str, ObservedMarket]) -> list[Interval]:
    """Return the intervals of the view, the longest first, since its candles change least often."""
    shown = {interval for market in markets.values() for interval in market.candles}
    return sorted(shown, key=INTERVALS.__getitem__, reverse=True)


def _interval_part(
    markets: Mapping[str, ObservedMarket], interval: Interval, at: datetime, names: Collection[str]
) -> dict[str, Any]:
    """Return the candles of all markets at an interval as rows by time, and their indicators by name.

    The variant's decision interval has more rows, and its indicators are series.
    """
    span = INTERVALS[interval]
    is_main = interval == next(iter(next(iter(markets.values())).candles))
    rows = ROWS_MIN if is_main else ROWS_MIN // 2
    first = floor_time(floor_time(at, span) - rows * span, ROWS_ADDED_MAX * span)
    own = [name for name in names if name not in SESSION_FIELDS]
    return {
        **candle_rows([market.candles.get(interval, ()) for market in markets.values()], first, span),
        "indicators": _columns(markets.values(), interval, own, is_series=is_main),
    }


def _columns(
    markets: Iterable[ObservedMarket], interval: Interval, names: Iterable[str], *, is_series: bool
) -> dict[str, list[Any]]:
    """Return the indicators of all markets by name: the last value of each, or the last few, oldest first."""
    past = [
        [indicator_values(each) for each in market.indicator_history.get(interval) or [market.indicators[interval]]]
        for market in markets
    ]
    return {
        name: [[each[name] for each in values] if is_series else values[-1][name] for values in past] for name in names
    }


def _session(markets: Collection[ObservedMarket], names: Collection[str]) -> dict[str, Any]:
    """Return the indicators of the UTC day, from the interval that closed last."""
    shortest = min((name for market in markets for name in market.indicators), key=INTERVALS.__getitem__)
    own = [name for name in names if name in SESSION_FIELDS]
    return _columns(markets, shortest, own, is_series=True)


def _decisions(view: View) -> list[str]:
    """Return the last decisions, oldest first, beginning at a time that stays the same for several cycles."""
    newest_first = view.memory.decisions
    if len(newest_first) > DECISIONS_SHOWN:
        grid = DECISIONS_ADDED_MAX * timedelta(minutes=view.every_minutes)
        since = floor_time(newest_first[DECISIONS_SHOWN - 1].at, grid)
        newest_first = tuple(decision for decision in newest_first if decision.at >= since)
    return [f"{minute_text(decision.at)} {decision.text}" for decision in reversed(newest_first)]


def _now(market: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a market that change every minute."""
    absent = {name for name in WHERE_KNOWN if market[name] is None}
    return {name: value for name, value in market.items() if name not in NOT_NOW | absent}


def _position_table(positions: Sequence[ObservedPosition]) -> list[list[Any]]:
    rows = []
    for position in positions:
        plan = position.exit_plan
        words = None if plan.invalidation is None else plan.invalidation[:INVALIDATION_CHARACTERS]
        rows.append([*_plain(replace(position, exit_plan=replace(plan, invalidation=words))).values()])
    return [[*ObservedPosition.__struct_encode_fields__], *rows] if rows else []


def _trade_table(trades: Sequence[ObservedTrade]) -> list[list[Any]]:
    names = [name for name in ObservedTrade.__struct_encode_fields__ if name not in ("fees", "funding")]
    return [names, *([*_shortened(_part(trade, names)).values()] for trade in trades)]


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
    """Return a struct as JSON values, with decimals in plain digits (10000 for 1E+4), at most `DIGITS_MAX` of them."""
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.to_builtins(value, builtin_types=(Decimal, datetime)))
    if isinstance(value, datetime):
        return minute_text(value)
    if isinstance(value, Decimal):
        return Decimal(format_decimal(value.normalize(_AMOUNTS)))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
