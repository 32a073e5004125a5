"""The prompt: the system message of an entrant and the view as JSON, ordered by how often their parts change.

Providers cache the beginning of a prompt and charge a fraction for it when it recurs. So the constant parts come first
(prompt, rules, glossary, fixed figures of the markets), then the candles, the longest interval first, with the hourly
funding rates among them, then everything that changes with a trade, and last everything that changes every minute.
Decisions are listed oldest first; the first one stays for a while, and new ones are appended.

External agents get the view as objects (`view_data`). Models read the same in fewer tokens (`prompt_text`): figures in
tables, candles as basis points, and nothing where there is nothing; the question comes last.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Context, Decimal
from functools import lru_cache
from statistics import fmean
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trader.agents.domain.conversation import ChatMessage
from trader.agents.domain.memory import DECISIONS_ADDED_MAX, DECISIONS_SHOWN
from trader.agents.domain.rules.sizing import Entry
from trader.agents.domain.tools import tool_schemas
from trader.agents.domain.view import SERIES_SHOWN, ObservedMarket, ObservedPosition, ObservedTrade, VariantLimits, View
from trader.core.clock import floor_time, iso
from trader.core.money import format_decimal
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import INTERVALS, Candle, Interval

ROWS_MIN: Final = 12
CONTEXT_ROWS_MIN: Final = 4
ROWS_MAX: Final = 20
"""Candles shown per interval: `ROWS_MIN` of the decision interval, and `CONTEXT_ROWS_MIN` of the others; more, up to
`ROWS_MAX`, where more of them close between two cycles."""

VOLUME_CANDLES: Final = 20
"""The candles before one that make the average with which its volume is compared."""

CANDLE_COLUMNS: Final = ("open", "high", "low", "close", "volume")
SESSION_FIELDS: Final = ("vwap", "vwapDeviation", "vwapUpper", "vwapLower")
"""The indicators of the UTC day, which are equal for all intervals."""

MARKET_FIELDS: Final = ("tick", "lot", "minNotional", "leverageMax")
"""Fields of a market that never change."""

NOT_NOW: Final = frozenset(
    {*MARKET_FIELDS, "symbol", "quotedAt", "candles", "indicators", "indicatorHistory", "fundingHistory"}
)
"""Fields of a market that appear elsewhere in the prompt; `stale` says whether the quote is too old."""

WHERE_KNOWN: Final = ("changeSinceLookPercent", "bookImbalance", "openInterest", "supplementary")
"""Fields that only some sources or cycles have; they are omitted if unknown."""

INDICATOR_NAMES: Final = tuple(name for name in Indicators.__struct_encode_fields__ if name != "close")
"""Names of the indicators in a prompt, without the close, which the candles contain."""

RATIOS: Final = ("drawdownPercent", "dayLossPercent")
DIGITS_MAX: Final = 8
"""Significant digits of an amount. The books may have three times as many, and every three digits cost a token."""

CANDLES_END: Final = ',"stats":'
"""The end of the part of a view that stays the same until a candle closes."""

INVALIDATION_CHARACTERS: Final = 70
"""Maximum characters shown of the model's own invalidation text of a position."""

INDICATORS_SHOWN: Final = 3
"""Number of last closed candles whose indicators the lean form shows."""

_AMOUNTS: Final = Context(prec=DIGITS_MAX)
_HOUR: Final = timedelta(hours=1)
_MINUTE: Final = timedelta(minutes=1)

_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")

CHARACTERS_PER_10_TOKENS: Final = 30
"""With o200k, ten tokens cover 31 characters of a prompt; with vocabularies that have a token per digit, fewer."""

_FORM: Final = f"""## The data

JSON. Times are ISO 8601 in UTC, amounts in the quote currency, quantities in base units; null: not known. Lists of
markets are in the order of `markets`. Candles are closed ones, oldest first, each
[{", ".join(CANDLE_COLUMNS)}]; the first row opened at `from`, and each further one an interval later.
Indicators are the last {SERIES_SHOWN} values, oldest first, or the last one alone; `fetchIndicators` has further ones.
Tables begin with the names of their columns; trades are newest first. A field that is not there is not known here.
"""

_LEAN_FORM: Final = """## The data

JSON. Times are ISO 8601 in UTC, amounts in the quote currency, quantities in base units. Tables begin with the names of
their columns; trades are newest first. What is null or absent is unknown or empty.
Candles are closed ones, oldest first, the last one ended an interval before `next`: per market [high, low, close] in
basis points from its last `close`. `indicators`: the last values, oldest first; `fetchIndicators` has further ones.
"""

GLOSSARY: Final = f"""- `relativeVolume`: a candle's volume / the average of the {VOLUME_CANDLES} candles before it.
- `fundingRate`: hourly, part of the notional; longs pay shorts a positive one. `fundingHistory`: oldest first.
- `unrealized` is gross: before `fees` (positive: paid) and `funding` (negative: paid). `netPnl` is after both.
- `price` and `mark` are the mark price; `openInterest` is the notional of all open positions in the market.
- `bookImbalance`: (bids − asks) / (bids + asks) of the quantities at the ten best prices of either side.
- `dayLossPercent`: the day's deepest fall below `dayOpeningEquity`; it stays when equity recovers, until 00:00 UTC.
- `lookedAt`: the last cycle that you answered; `changeSinceLookPercent`: how far the price has moved since.
  `candleCloses`: when the next candle closes, and how many have closed since `lookedAt`.
- `decisions`: your last ones, oldest first. `refused`: your last cycle's calls that were refused or failed, and why.
- `entries`: what an order on either side would be by your rules of size, within all caps; without a row, none is
  possible. `cost`: fees and spread, in and out, as a share of the way to its target, or to its stop without one."""

QUESTION: Final = "Decide now: call exactly one tool, such as createPosition to enter or holding to wait."
"""The last words of a prompt: without a question, small models describe the data instead of deciding."""

FOLLOWING: Final = dict.fromkeys(("bid", "ask", "initialCapital"))
"""Fields that the lean form leaves out, since nothing in a decision depends on them beside the others."""

SHORTENINGS: Final = (
    "",
    "candles except of the first interval",
    "candles",
    "candles, past decisions, trades and funding rates",
)
"""What a view leaves out, in this order, until its prompt fits into the model's context."""

EXACT: Final = frozenset(
    {"vwap", "vwapUpper", "vwapLower", "kijunSen"}
    | {name for name in INDICATOR_NAMES if name.startswith(("ema", "bollinger", "keltner"))}
)
"""Indicators that are prices, which orders repeat."""


def opening_messages(
    prompt: str,
    limits: VariantLimits,
    view: View,
    entries: Sequence[Entry] = (),
    *,
    is_lean: bool = True,
    shortening: int = 0,
) -> list[ChatMessage]:
    """Return the system message of an entrant and the user message of this cycle.

    Models get the lean form of the view, with `entries` if the prompt names them; external agents the objects. The view
    is without what `SHORTENINGS` names at this place, for a small context.
    """
    cadence = cadence_text(view.cadence, _decision_interval(view))
    form = _LEAN_FORM if is_lean else _FORM
    system = f"{prompt.strip()}\n\n{rules_text(limits)}\n\n{form}{GLOSSARY}\n\n{cadence}"
    data = view_data(view, named_indicators(prompt), entries if "`entries`" in prompt else ())
    if is_lean:
        shown, question = _shortened_view(lean(data), shortening, _decision_interval(view)), f"\n\n{QUESTION}"
    else:  # where strategies have `view.markets["BTC"].price`, agents have `markets.BTC.price`
        markets = {symbol: {**fixed, **data["now"][symbol]} for symbol, fixed in data["markets"].items()}
        shown, question = {**data, "markets": markets}, ""
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": json_text(shown) + question},
    ]


def rules_text(limits: VariantLimits) -> str:
    """Return the guard's rules with this variant's figures."""
    return f"""## Rules that are enforced

A guard refuses what breaks a rule, and you are told why.
- Leverage of a position: at most {limits.leverage_max}, and never above the market's own `leverageMax`.
- A position needs a stop. Stop and invalidationPrice lie on the losing side of the mark, the target on the winning one.
- One position is worth at most {limits.position_notional_max} × equity; all positions together at most \
{limits.leverage_max} × equity. What rests counts as filled.
- No new position in a market whose `stale` is true; no decision over {limits.decision_age_max_s} s after this view.
- No reversal of a market within {limits.reversal_cycles} cycles of the last trade in it (`lastAction`), any exit \
included. A cycle is 60 seconds.
- Once `dayLossPercent` is {limits.day_loss_max_percent} or more, only reducing is allowed until 00:00 UTC.

You act through the tools only; people read what you write. `holding` ends the cycle, in an answer of its own."""


def estimated_tokens(messages: Sequence[ChatMessage], symbols: tuple[str, ...], tools_off: tuple[str, ...] = ()) -> int:
    """Return the maximum number of tokens of a prompt with the tools of these markets, from its number of characters.

    The bound holds for the tokenizers in use.
    """
    characters = len(json_text(messages)) + len(json_text(tool_schemas(symbols, tools_off)))
    return characters * 10 // CHARACTERS_PER_10_TOKENS


def cadence_text(cadence: timedelta, interval: Interval) -> str:
    """Say how often the model is asked, and what that means for decisions on candles of this interval."""
    minutes = cadence // _MINUTE
    often = "minute" if minutes == 1 else f"{minutes} minutes"
    text = f"You are asked every {often}. Between two of your cycles only your exit plans act."
    cycles = INTERVALS[interval] // cadence
    if cycles <= 1:
        return text
    return (
        f"{text} So {cycles} of your cycles see the same `{interval}` candles and indicators. While `candleCloses` "
        "counts none closed since you looked, you have judged their signal already: do not enter on it a second time, "
        f"not after an exit either. `candlesAgo` of `lastAction` counts the `{interval}` candles closed since your "
        "last trade in the market."
    )


def named_indicators(prompt: str) -> list[str]:
    """Return the indicators that a prompt names in backticks, or all if it names none."""
    named = set(re.findall(r"`(\w+)`", prompt))
    return [name for name in INDICATOR_NAMES if name in named] or list(INDICATOR_NAMES)


def view_data(view: View, names: Collection[str] = INDICATOR_NAMES, entries: Sequence[Entry] = ()) -> dict[str, Any]:
    """Return the view as JSON objects, with the indicators of these names. An absent value is null."""
    markets, intervals = view.markets, _intervals(view.markets)
    plain = {  # candles and indicators, the bulk of a market, are shown in columns
        symbol: _plain(replace(market, candles={}, indicators={}, indicator_history={}))
        for symbol, market in markets.items()
    }
    parts: dict[str, Any] = {interval: _interval_part(view, interval, names) for interval in intervals}
    slow: dict[str, Any] = {name: parts.pop(name) for name in intervals if INTERVALS[name] >= _HOUR}
    rates = {symbol: market["fundingHistory"] for symbol, market in plain.items() if market["fundingHistory"]}
    return {
        "markets": {symbol: _named(market, MARKET_FIELDS) for symbol, market in plain.items()},
        **slow,
        **({"fundingHistory": rates} if rates else {}),
        **parts,
        "stats": _shortened(_plain(view.stats)),
        "trades": _trade_table(view.trades),
        "note": view.memory.note,
        "decisions": _decisions(view),
        "at": minute_text(view.at),
        "lookedAt": None if view.memory.looked_at is None else minute_text(view.memory.looked_at),
        "candleCloses": {interval: _closes(view, INTERVALS[interval]) for interval in intervals},
        **({} if view.restriction is None else {"restriction": view.restriction}),
        **({"data": view.data} if view.data else {}),
        "refused": view.memory.refused,
        "session": _session(markets.values(), names),
        "now": {symbol: _now(market, view) for symbol, market in plain.items()},
        "account": _plain(view.account) | _shortened(_named(_plain(view.account), RATIOS)),
        "positions": _position_table(view.positions),
        "orders": [_plain(order) for order in view.orders],
        **({"entries": [Entry._fields, *([*map(_shortened, entry)] for entry in entries)]} if entries else {}),
    }


def lean(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of a view in fewer tokens: as tables, candles as basis points, and without what is absent.

    What follows from other figures is left out: the capital, bid and ask, and when a table of candles begins.
    """
    session = data["session"]
    now = {
        symbol: {**market, **FOLLOWING, **{name: values[place][-1] for name, values in session.items()}}
        for place, (symbol, market) in enumerate(data["now"].items())
    }
    tables = {
        "markets": _table("symbol", data["markets"]),
        **{each: _lean_interval(data[each], list(now)) for each in data["candleCloses"]},
        "candleCloses": _table("interval", data["candleCloses"]),
        "now": _table("symbol", now),
        "account": data["account"] | FOLLOWING,
    }
    shown = {name: _present(tables.get(name, value)) for name, value in data.items() if name != "session"}
    return {name: value for name, value in shown.items() if value not in (None, [], ())}


def _shortened_view(shown: Mapping[str, Any], shortening: int, main: Interval) -> dict[str, Any]:
    """Return a lean view without what is left out at this place of `SHORTENINGS`, which it then states."""
    if not shortening:
        return {**shown}
    bare = {interval for interval, *_ in shown["candleCloses"][1:] if shortening > 1 or interval != main}
    dropped = ("decisions", "trades", "fundingHistory") if shortening > 2 else ()
    kept = {
        name: {"indicators": value["indicators"]} if name in bare else value
        for name, value in shown.items()
        if name not in dropped
    }
    return {**kept, "leftOut": f"{SHORTENINGS[shortening]}, since they exceed your context"}


def _lean_interval(part: Mapping[str, Any], symbols: Sequence[str]) -> dict[str, Any]:
    """Return the last candles as basis points from the last close of their market, and indicators as a table."""
    closes, candles, rows, figures = [], [], [], part["indicators"].items()
    for place, symbol in enumerate(symbols):
        series = [row[place] for row in part["candles"]]
        close = next((candle[3] for candle in reversed(series) if candle), None)
        closes.append(close)
        candles.append([candle and [round(10_000 * (price / close - 1)) for price in candle[1:4]] for candle in series])
        last = {name: values if isinstance(values := each[place], list) else [values] for name, each in figures}
        for back in range(min(INDICATORS_SHOWN, max(map(len, last.values()))), 0, -1):
            known = {name: values[-back] if len(values) >= back else None for name, values in last.items()}
            shown = (
                significant(value, 6 if name in EXACT else 3) if isinstance(value, float) else value
                for name, value in known.items()
            )
            rows.append([symbol, *shown])
    table = [["symbol", *part["indicators"]], *rows]
    return {"close": closes, "candles": candles, "indicators": table}


def _table(key: str, rows: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """Return records by their key as a table, without the columns that no record has."""
    names = dict.fromkeys(name for row in rows.values() for name, value in row.items() if value is not None)
    return [[key, *names], *([each, *map(row.get, names)] for each, row in rows.items())]


def _present(value: Any) -> Any:
    """Return the value without the absent fields of its objects."""
    if isinstance(value, dict):
        return {name: _present(each) for name, each in value.items() if each is not None}
    return [_present(each) for each in value] if isinstance(value, list | tuple) else value


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


def _decision_interval(view: View) -> Interval:
    """Return the interval on which the agent decides: the first of the variant's."""
    return next(iter(next(iter(view.markets.values())).candles))


def _interval_part(view: View, interval: Interval, names: Collection[str]) -> dict[str, Any]:
    """Return the candles of all markets at an interval as rows by time, and their indicators by name.

    The variant's decision interval has more rows, and its indicators are series.
    """
    span, markets = INTERVALS[interval], view.markets.values()
    is_main = interval == _decision_interval(view)
    least = ROWS_MIN if is_main else CONTEXT_ROWS_MIN
    rows = min(max(least, -(-view.cadence // span)), ROWS_MAX)
    first = floor_time(view.at, span) - rows * span
    own = [name for name in names if name not in SESSION_FIELDS]
    candles = [market.candles.get(interval, ()) for market in markets]
    volumes = [relative_volumes(series, SERIES_SHOWN) for series in candles]
    return {
        **candle_rows(candles, first, span),
        "indicators": {
            **_columns(markets, interval, own, is_series=is_main),
            "relativeVolume": volumes if is_main else [each[-1] for each in volumes],
        },
    }


def relative_volumes(candles: Sequence[Candle], count: int) -> list[float | None]:
    """Return the volumes of the last `count` candles, each as a multiple of the average of the candles before it.

    None where there are too few candles, and where their volume is unknown.
    """
    volumes = [candle.volume for candle in candles]
    relative: list[float | None] = []
    for place in range(len(volumes) - count, len(volumes)):
        before = volumes[place - VOLUME_CANDLES : place] if place >= VOLUME_CANDLES else []
        average = fmean(before) if before else 0.0
        relative.append(significant(volumes[place] / average, 3) if average > 0 else None)
    return relative


def _closes(view: View, span: timedelta) -> dict[str, Any]:
    """Return when the next candle of an interval closes, and how many have closed since the agent last looked."""
    last, looked_at = floor_time(view.at, span), view.memory.looked_at
    closed = None if looked_at is None else (last - floor_time(looked_at, span)) // span
    return {"next": minute_text(last + span), "closed": closed}


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
        grid = DECISIONS_ADDED_MAX * view.cadence
        since = floor_time(newest_first[DECISIONS_SHOWN - 1].at, grid)
        newest_first = tuple(decision for decision in newest_first if decision.at >= since)
    return [f"{minute_text(decision.at)} {decision.text}" for decision in reversed(newest_first)]


def _now(market: Mapping[str, Any], view: View) -> dict[str, Any]:
    """Return the fields of a market that change every minute."""
    absent = {name for name in WHERE_KNOWN if market[name] is None}
    shown = {name: value for name, value in market.items() if name not in NOT_NOW | absent}
    if (last := shown["lastAction"]) is not None:
        span = INTERVALS[_decision_interval(view)]
        traded_at = floor_time(view.at, _MINUTE) - last["cyclesAgo"] * _MINUTE
        shown["lastAction"] = last | {"candlesAgo": (floor_time(view.at, span) - floor_time(traded_at, span)) // span}
    return shown


def _position_table(positions: Sequence[ObservedPosition]) -> list[list[Any]]:
    rows = []
    for position in positions:
        plan = position.exit_plan
        words = None if plan.invalidation is None else plan.invalidation[:INVALIDATION_CHARACTERS]
        shown = _plain(replace(position, exit_plan=replace(plan, invalidation=words)))
        shown["exitPlan"] = {
            name: value
            for name, value in shown["exitPlan"].items()
            if value or name not in ("trailingDistance", "targets")
        }
        rows.append([*shown.values()])
    return [[*ObservedPosition.__struct_encode_fields__], *rows] if rows else []


def _trade_table(trades: Sequence[ObservedTrade]) -> list[list[Any]]:
    names = [name for name in ObservedTrade.__struct_encode_fields__ if name not in ("fees", "funding")]
    return [names, *([*_shortened(_named(_plain(trade), names)).values()] for trade in trades)] if trades else []


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
