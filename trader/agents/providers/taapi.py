"""Client of taapi.io: supplementary indicators, cached and rate-limited, and absent when unavailable.

No caller waits: `latest` returns the cached values and, if they are old and the plan's rate limit allows it, starts a
request in the background. The values come from the present spot market of another venue, so they accompany only live
prices, never a replay or a synthetic market.
"""

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

import aiohttp

from trader.agents.domain.conversation import value_in
from trader.agents.domain.view import Supplementary
from trader.agents.providers.attempts import read_bounded
from trader.agents.providers.refusals import decoded
from trader.core import tasks
from trader.core.clock import Clock, interval_elapsed
from trader.market.domain.markets import Interval
from trader.settings.forms import Secret
from trader.settings.settings import Settings

URL: Final = "https://api.taapi.io"
EXCHANGE: Final = "binance"
QUOTED_IN: Final = "USDT"
INTERVAL: Final[Interval] = "1h"

REQUEST_EVERY: Final = timedelta(seconds=15)
"""The free plan allows one request every 15 seconds."""

REFRESH_AFTER: Final = timedelta(minutes=5)
SHOWN_FOR: Final = timedelta(minutes=15)
"""Maximum age of returned values."""

REST: Final = timedelta(minutes=1)
REST_MAX: Final = timedelta(minutes=10)
"""Pause in requests after a failure, doubling with each consecutive failure, and its maximum."""

ATTEMPT_LIMIT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 256 * 1024

FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "macd": {"valueMACD": "macd", "valueMACDSignal": "macd_signal", "valueMACDHist": "macd_histogram"},
    "stochrsi": {"valueFastK": "stoch_rsi_k", "valueFastD": "stoch_rsi_d"},
    "supertrend": {"value": "supertrend"},
    "mfi": {"value": "money_flow_index"},
    "cmf": {"value": "chaikin_money_flow"},
}
"""For each taapi.io indicator, the fields of `Supplementary` that hold its values."""

_log = logging.getLogger("trader.agents")


class _Failed(Exception):
    """No usable answer. The message says why, without the answer's text, which may contain the key."""


class Taapi:
    """Client of taapi.io. `latest` never waits and never raises; `close` cancels a running request."""

    def __init__(self, key: Secret, clock: Clock, *, url: str = URL, attempt_limit_s: float = ATTEMPT_LIMIT_S) -> None:
        self._key = key
        self._clock = clock
        self._url = f"{url.rstrip('/')}/bulk"
        self._attempt_limit_s = attempt_limit_s
        self._latest: dict[str, Supplementary] = {}
        self._asked_at: dict[str, datetime] = {}
        self._waiting: dict[str, None] = {}
        self._rests: tuple[datetime, timedelta] | None = None
        self._next_rest = REST
        self._is_refused = False
        self._request: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return "Taapi()"

    def latest(self, symbol: str) -> Supplementary | None:
        """Return the indicators of a market, at most 15 minutes old; None when there are none."""
        now = self._clock.now()
        asked_at = self._asked_at.get(symbol)
        if asked_at is None or _is_over(asked_at, REFRESH_AFTER, now):
            self._waiting[symbol] = None
        if self._waiting and self._may_ask(now):
            self._ask_for(next(iter(self._waiting)), now)  # longest wait first: a failing market blocks no other
        values = self._latest.get(symbol)
        is_fresh = values is not None and values.fetched_at <= now <= values.fetched_at + SHOWN_FOR
        return values if is_fresh else None

    async def settled(self) -> None:
        """Wait until no request is in progress."""
        if self._request is not None:
            await asyncio.wait([self._request])

    async def close(self) -> None:
        self._is_refused = True
        await tasks.end(self._request)
        if self._session is not None:
            await self._session.close()

    def _ask_for(self, symbol: str, now: datetime) -> None:
        del self._waiting[symbol]
        self._asked_at[symbol] = now
        self._rests = now, REQUEST_EVERY
        self._request = tasks.start(self._refresh(symbol), f"taapi.io {symbol}")

    def _may_ask(self, now: datetime) -> bool:
        is_busy = self._request is not None and not self._request.done()
        return not self._is_refused and not is_busy and (self._rests is None or _is_over(*self._rests, now))

    async def _refresh(self, symbol: str) -> None:
        try:
            values = await self._fetch(symbol)
        except _Failed as failure:
            self._asked_at.pop(symbol, None)
            self._rests = self._clock.now(), self._next_rest
            _log.warning(
                "taapi.io: no indicators for %s (%s); next attempt in %.0f s at the earliest",
                symbol,
                failure,
                self._next_rest.total_seconds(),
            )
            self._next_rest = min(self._next_rest * 2, REST_MAX)
            return
        self._next_rest = REST
        self._latest[symbol] = Supplementary(
            source="taapi.io", venue=EXCHANGE, interval=INTERVAL, fetched_at=self._clock.now(), **values
        )

    async def _fetch(self, symbol: str) -> dict[str, float]:
        """Request the values of a market. :raises _Failed: there are none"""
        body = {
            "secret": self._key.reveal(),
            "construct": {
                "exchange": EXCHANGE,
                "symbol": f"{symbol}/{QUOTED_IN}",
                "interval": INTERVAL,
                # Use the last closed candle, like all other indicators.
                "indicators": [{"id": name, "indicator": name, "backtrack": 1} for name in FIELDS],
            },
        }
        try:
            async with (
                asyncio.timeout(self._attempt_limit_s),
                self._client().post(self._url, json=body, allow_redirects=False) as response,
            ):
                status, content = response.status, await read_bounded(response, ANSWER_BYTES_MAX)
        except TimeoutError:
            raise _Failed(f"no answer within {self._attempt_limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(type(error).__name__) from None
        if status in {401, 403}:
            self._is_refused = True
            _log.error("taapi.io refused the key with status %d; it is out of use until a restart", status)
        if status != 200:
            raise _Failed(f"status {status}")
        if len(content) > ANSWER_BYTES_MAX:
            raise _Failed(f"more than {ANSWER_BYTES_MAX // 1024} KiB")
        items = value_in(decoded(content), "data")
        if not isinstance(items, list):
            raise _Failed("an answer of an unknown form")
        values = {
            field: float(value)
            for item in items
            for name, field in FIELDS.get(str(value_in(item, "id") or value_in(item, "indicator")), {}).items()
            if isinstance(value := value_in(item, "result", name), int | float) and not isinstance(value, bool)
        }
        if not values:
            raise _Failed("an answer without values")
        return values

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self._session


def _is_over(since: datetime, span: timedelta, now: datetime) -> bool:
    """Return whether the span has passed, or the clock was set back to before its start."""
    return interval_elapsed(since + span, span, now)


def make_supplier(settings: Settings, clock: Clock) -> Taapi | None:
    """Return the configured supplier; None without a key, or if the market source is not live."""
    if settings.taapi_api_key is None or settings.market_source != "venue":
        return None
    return Taapi(settings.taapi_api_key, clock)
