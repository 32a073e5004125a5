"""Requests to one address of a venue, each taken from the budget before it is sent."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
import msgspec

from trader.core.errors import MarketDataError
from trader.live.budget import RequestBudget
from trader.live.market import Listing

ANSWER_LIMIT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
_TRIES_MAX: Final = 4
_PAUSE_S_MAX: Final = 3.0
"""Callers hold an account meanwhile; a rate limit that lasts longer is an error of the request."""

TOO_MANY: Final = 429


class VenueHttp:
    """The interface at one address. Its methods raise `MarketDataError` when there is no answer."""

    def __init__(self, base_url: str, budget: RequestBudget, *, pause_s: float) -> None:
        """Share `budget` with the others who ask this address. `pause_s` is the first pause after a rate limit."""
        self.base_url = base_url
        self.budget = budget
        self.answered_at: datetime | None = None
        """The time of the latest answer by the venue's clock; None until one states its date."""

        self.known: dict[str, Listing] = {}
        """The perpetual markets as they were listed last, with those that are listed no more."""

        self._pause_s = pause_s
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Return the HTTP session, created on first use within a running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_LIMIT_S))
        return self._session

    def remember(self, listings: Mapping[str, Listing]) -> Mapping[str, Listing]:
        """Note what is listed now, and return it."""
        gone = {symbol: msgspec.structs.replace(old, is_active=False) for symbol, old in self.known.items()}
        self.known = {**gone, **listings}
        return listings

    def listing(self, symbol: str) -> Listing:
        if (listing := self.known.get(symbol)) is None:
            raise MarketDataError(f"the venue does not list {symbol}")
        return listing

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def read(self, method: str, path: str, weight: int, **options: Any) -> tuple[int, bytes]:
        """Send a request that changes nothing, and return its status and body; retry when over the rate limit."""
        pause_s = self._pause_s
        for last in (False,) * (_TRIES_MAX - 1) + (True,):
            await self.budget.take(weight)
            status, headers, body = await self.ask(method, path, **options)
            if status != TOO_MANY or last:
                break
            await asyncio.sleep(min(_seconds(headers.get("Retry-After")) or pause_s, _PAUSE_S_MAX))
            pause_s *= 2
        return status, body

    async def ask(self, method: str, path: str, **options: Any) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request once; the caller has taken it from the budget."""
        url = self.base_url + path
        try:
            async with self.session().request(method, url, allow_redirects=False, **options) as answer:
                body = await answer.content.read(ANSWER_BYTES_MAX + 1)
                while body and len(body) <= ANSWER_BYTES_MAX and (more := await answer.content.readany()):
                    body += more
                if len(body) > ANSWER_BYTES_MAX:
                    raise MarketDataError(f"{path}: the venue's answer is too long")
                self.answered_at = _date(answer.headers.get("Date")) or self.answered_at
                return answer.status, answer.headers, body
        except (aiohttp.ClientError, TimeoutError) as error:
            raise MarketDataError(f"{self.base_url} cannot be reached: {str(error) or type(error).__name__}") from error


def excerpt(body: bytes) -> str:
    """Return the start of an answer, for messages."""
    return body[:200].decode(errors="replace")


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() else None


def _date(text: str | None) -> datetime | None:
    """Return the time of a header `Date`; None if it is missing or malformed."""
    try:
        at = parsedate_to_datetime(text or "")
    except ValueError:
        return None
    return None if at.tzinfo is None else at
