"""Transactions of one account at Lighter: nonces, sending with the venue's client, and interpreting its answers."""

from asyncio import timeout
from typing import Any, Final

import aiohttp
import msgspec

from trader.live.lighter.api import LighterApi
from trader.live.lighter.signer import Signed, Signer

INVALID_NONCE: Final = 21104
INDEX_EXISTS: Final = 21728
INACTIVE: Final = frozenset({21600, 21709, 21715})
"""The venue's codes for canceling an order that is not open."""

_SEND_LIMIT_S: Final = 10.0


class _NextNonce(msgspec.Struct):
    nonce: int
    code: int = 200


_NEXT_NONCE: Final = msgspec.json.Decoder(_NextNonce)


class SendAnswer(msgspec.Struct, frozen=True):
    """The venue's answer to a transaction: accepted, refused with a code, or (`is_known` False) lost."""

    is_known: bool
    is_accepted: bool = False
    code: int = 0
    reason: str = ""


class Transactions:
    """Sends signed transactions. The caller sends one at a time, so that nonces arrive in order."""

    def __init__(self, api: LighterApi, signer: Signer, *, send_limit_s: float = _SEND_LIMIT_S) -> None:
        self._api = api
        self._signer = signer
        self._send_limit_s = send_limit_s
        self._is_halted = False

    def halt(self) -> None:
        """Stop sending: another process may now trade the account."""
        self._is_halted = True

    async def next_nonce(self) -> int:
        """Return the nonce that the venue expects next. Raise `MarketDataError` when it does not report one."""
        parameters: dict[str, str | int] = {
            "account_index": self._signer.account_index,
            "api_key_index": self._signer.key_index,
        }
        return (await self._api.get("/api/v1/nextNonce", parameters, _NEXT_NONCE)).nonce

    async def cancel(self, market_id: int, index: int, *, nonce: int) -> SendAnswer:
        """Send the cancellation of an order, identified by the venue's index or ours."""
        return await self.send(self._signer.cancel_order(market_id, index, nonce=nonce))

    async def send(self, signed: Signed) -> SendAnswer:
        """Send with the venue's own client. An unintelligible answer counts as lost."""
        if self._is_halted:
            return _lost("this process no longer trades")
        try:
            async with timeout(self._send_limit_s):
                answer: Any = await self._signer.sender.send_tx(tx_type=signed.kind, tx_info=signed.text)
        except self._signer.status_error as error:
            return _answer_of(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _lost(f"the venue did not answer: {str(error) or type(error).__name__}")
        except (ValueError, LookupError, TypeError) as error:  # not a valid form of the venue's answers
            return _lost(f"the venue's answer cannot be decoded: {error}")
        code = getattr(answer, "code", None)  # the SDK does not check that an answer is complete
        if not isinstance(code, int):
            return _lost(f"the venue's answer cannot be decoded: {answer}")
        return SendAnswer(
            is_known=True, is_accepted=code == 200, code=code, reason=str(answer.message or f"code {code}")
        )


def _lost(reason: str) -> SendAnswer:
    return SendAnswer(is_known=False, reason=reason)


def _answer_of(error: Exception) -> SendAnswer:
    """Interpret the SDK's error: a status of 400 to 499 is a refusal by the venue, anything else a lost answer."""
    status, body = getattr(error, "status", None), getattr(error, "body", None)
    reason = f"the venue answered with status {status}: {str(body)[:200]}"
    if not isinstance(status, int) or not 400 <= status < 500:
        return _lost(reason)
    try:
        decoded = msgspec.json.decode(body or "{}")
    except msgspec.DecodeError:
        decoded = {}
    code = decoded.get("code", 0) if isinstance(decoded, dict) else 0
    return SendAnswer(is_known=True, code=code if isinstance(code, int) else 0, reason=reason)
