"""Signatures at Hyperliquid equal the published vectors, and only what the venue accepts is signed."""

import json
from pathlib import Path
from typing import Any

import pytest

from trader.core.errors import StartError
from trader.live.hyperliquid.signer import HyperliquidSigner
from trader.settings.forms import Secret

pytest.importorskip("eth_account", reason="the extra `live` is not installed")
pytestmark = pytest.mark.sdk

FILE = Path(__file__).parents[4] / "shared" / "data" / "venues" / "hyperliquid" / "signing_vectors.json"
KEY = "0x" + "0123456789" * 6 + "0123"


def vectors() -> list[dict[str, Any]]:
    if not FILE.exists():
        return []
    return [each for each in json.loads(FILE.read_text())["vectors"] if each["kind"].startswith("l1_action")]


@pytest.mark.skipif(not FILE.exists(), reason="the published vectors are not on this machine")
def test_actions_are_signed_as_published() -> None:
    for vector in vectors():
        signer = HyperliquidSigner(Secret(KEY), is_testnet=not vector["is_mainnet"])
        whole = vector["action"], vector["nonce"], vector["vault_address"], vector["expires_after"]
        assert "0x" + signer.hash_of(*whole).hex() == vector["action_hash"], vector["name"]
        if vector["kind"] == "l1_action":
            assert signer.sign(*whole)._asdict() == vector["expected"], vector["name"]


def test_the_known_vector_is_checked_at_the_start() -> None:
    signer = HyperliquidSigner(Secret(KEY), is_testnet=False)
    signer.check()
    assert signer.address == "0x14791697260e4c9a71f18484c9f997b308e59325"
    assert [signer.next_nonce(5), signer.next_nonce(5), signer.next_nonce(4), signer.next_nonce(9)] == [5, 6, 7, 9]


def test_a_key_of_another_venue_is_refused_without_being_shown() -> None:
    with pytest.raises(StartError, match="not that of a wallet") as refused:
        HyperliquidSigner(Secret("ab" * 40), is_testnet=False)
    assert "abab" not in str(refused.value)
