"""Transactions of one account at Lighter: nonces, sending with the venue's client, and what became of them.

The answer to a sending says only whether the venue took the transaction; what came of it says its own status.
"""

from asyncio import timeout
from datetime import datetime
from typing import Any, Final

import aiohttp
import msgspec

from trader.core.errors import MarketDataError
from trader.live.lighter.api import LighterApi, VenueRefusal, code_of
from trader.live.lighter.frames import AccountFrames
from trader.live.lighter.rows import Transaction
from trader.live.lighter.signer import Signed

INVALID_NONCE: Final = 21104
INDEX_EXISTS: Final = 21728
INACTIVE: Final = frozenset({21600, 21709, 21715})
"""The venue's codes for canceling an order that is not open."""

REFUSALS: Final = frozenset(
    {
        *range(21100, 21115), *range(21116, 21142), 21149, 21501, 21504, 21505, 21507, 21508, *range(21511, 21517),
        *range(21600, 21604), *range(21605, 21609), *range(21611, 21627), *range(21700, 21746), *range(21801, 21810),
    }
)  # fmt: skip
"""The venue's published codes for a transaction that it does not execute. Any other answer proves nothing."""

TOO_MANY: Final = 23000
BUSY: Final = frozenset({21506, TOO_MANY})
_OK, _BAD, _TOO_MANY = 200, 400, 429
_NOT_FOUND: Final = frozenset({21500, 29404})
_LATEST: Final = 100
_SEND_LIMIT_S: Final = 10.0
_QUOTA_KNOWN_S: Final = 60.0
"""The venue states the quota only in its answers, and allows one transaction every 15 seconds without it."""

_CANCEL: Final = 15
"""The kind of transaction that the quota does not count."""


class _NextNonce(msgspec.Struct):
    nonce: int


class _Transactions(msgspec.Struct):
    txs: list[Transaction] | None = None


_NEXT_NONCE: Final = msgspec.json.Decoder(_NextNonce)
_TRANSACTION: Final = msgspec.json.Decoder(Transaction)
_TRANSACTIONS: Final = msgspec.json.Decoder(_Transactions)


class SendAnswer(msgspec.Struct, frozen=True):
    """The venue's answer to a transaction. `is_taken` is None after no answer, or one that proves nothing."""

    is_taken: bool | None
    code: int = 0
    reason: str = ""


class Transactions:
    """Sends signed transactions. The caller sends one at a time, so that nonces arrive in order."""

    def __init__(self, api: LighterApi, frames: AccountFrames, *, send_limit_s: float = _SEND_LIMIT_S) -> None:
        self._api = api
        self._frames = frames
        self._signer = frames.signer
        self._send_limit_s = send_limit_s
        self._is_halted = False

    def halt(self) -> None:
        """Stop sending: another process may now trade the account."""
        self._is_halted = True

    async def next_nonce(self) -> int:
        """Return the nonce that the venue expects next. Raise `MarketDataError` when it does not report one."""
        account_index, key_index = self._signer.account_index, self._signer.key_index
        answer = await self._api.get(
            "/api/v1/nextNonce", _NEXT_NONCE, account_index=account_index, api_key_index=key_index
        )
        return answer.nonce

    async def find(self, attempt: str) -> Transaction | None:
        """Return what became of a transaction, or None while that is unknown. Raise `MarketDataError`.

        If the venue does not know its hash, another that used its nonce up, executed or refused by the sequencer: then
        it can never be executed.
        """
        if (pushed := self._frames.transaction(attempt)) is not None:
            return pushed
        nonce, _, digest = attempt.partition(":")
        try:
            return await self._api.get("/api/v1/tx", _TRANSACTION, by="hash", value=digest)
        except VenueRefusal as error:
            if error.code not in _NOT_FOUND:
                raise
        found = [each for each in await self._latest() if each.nonce == int(nonce)]
        return next((each for each in found if each.is_executed or each.is_failed or each.is_of(attempt)), None)

    async def opened_since(self, since: datetime) -> set[int]:
        """Return the client indexes of the latest orders of this key that could open. Raise `MarketDataError`."""
        recent = [each.opens for each in await self._latest() if each.at >= since]
        return set().union(*recent)

    async def _latest(self) -> list[Transaction]:
        """Return the latest transactions of this key, newest first."""
        signer = self._signer
        answer = await self._api.get(
            "/api/v1/accountTxs", _TRANSACTIONS, signer=signer,
            by="account_index", value=signer.account_index, limit=_LATEST,
        )  # fmt: skip
        return [each for each in answer.txs or () if each.api_key_index == signer.key_index]

    async def cancel(self, market_id: int, index: int, *, nonce: int) -> tuple[str, SendAnswer]:
        """Send the cancellation of an order, named by the venue's index or ours. Return its attempt and the answer."""
        signed = self._signer.cancel_order(market_id, index, nonce=nonce)
        return f"{nonce}:{signed.hash}", await self.send(signed)

    async def send(self, signed: Signed) -> SendAnswer:
        """Send with the venue's own client. An unintelligible answer counts as lost."""
        if self._is_halted:
            return SendAnswer(None, reason="this process no longer trades")
        account = str(self._signer.account_index)
        try:
            self._api.budget.spend(account, signed.kind != _CANCEL)
            await self._api.take("sendTx", signed.kind)
        except MarketDataError as error:
            return SendAnswer(False, TOO_MANY, str(error))
        try:
            async with timeout(self._send_limit_s):
                answer: Any = await self._signer.sender.send_tx(tx_type=signed.kind, tx_info=signed.text)
        except self._signer.status_error as error:
            return _judge(getattr(error, "status", None), getattr(error, "body", None))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return SendAnswer(None, reason=f"the venue did not answer: {str(error) or type(error).__name__}")
        except (ValueError, LookupError, TypeError) as error:  # not a valid form of the venue's answers
            return SendAnswer(None, reason=f"the venue's answer cannot be decoded: {error}")
        quota = getattr(answer, "volume_quota_remaining", None)
        if isinstance(quota, int) and quota >= 0 and self._api.has_quota:
            self._api.budget.allow(account, quota, _QUOTA_KNOWN_S)
        # The SDK does not check that an answer is complete.
        known = {"code": getattr(answer, "code", None), "message": getattr(answer, "message", None)}
        return _judge(_OK, msgspec.json.encode(known))


def _judge(status: object, body: Any) -> SendAnswer:
    """Interpret an answer: only a code that the venue published for a refusal is one."""
    code = code_of(body)
    if status == _TOO_MANY and not code:
        code = TOO_MANY
    is_refused = (status in (_OK, _BAD) and code in REFUSALS) or (status in (_OK, _BAD, _TOO_MANY) and code in BUSY)
    is_taken = False if is_refused else (status, code) == (_OK, _OK) or None
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    return SendAnswer(is_taken, code, f"the venue answered with status {status}: {text[:200]}")
