"""Answers of a venue's interface without a venue."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from trader.live.hyperliquid.api import HyperliquidApi
from trader.live.lighter.api import LighterApi
from trader.live.lighter.frames import AccountFrames
from trader.live.lighter.records import LighterRecords


def answering(patch: pytest.MonkeyPatch, api: HyperliquidApi | LighterApi, answer: Callable[[], object]) -> None:
    """Let an interface return this answer to every request, decoded as it asks."""

    async def info(_: str, kind: type[Any], **more: object) -> Any:
        return msgspec.json.decode(msgspec.json.encode(answer()), type=kind)

    async def get(_: str, decoder: "msgspec.json.Decoder[Any]", **more: object) -> Any:
        return decoder.decode(msgspec.json.encode(answer()))

    patch.setattr(api, *(("info", info) if isinstance(api, HyperliquidApi) else ("get", get)))


def lighter_records(patch: pytest.MonkeyPatch, answer: Callable[[], object]) -> LighterRecords:
    """Return an account's records at Lighter, which answers this to every request."""
    api = LighterApi("http://there")
    answering(patch, api, answer)
    frames = SimpleNamespace(signer=SimpleNamespace(account_index=1))
    return LighterRecords(api, cast("AccountFrames", frames))
