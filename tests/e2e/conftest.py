"""What the end-to-end tests share."""

from pathlib import Path

import pytest
from support.orpc import installed_client
from support.process import ROOT

CANDLES = ROOT.parent / "shared" / "data"
"""Real 1-minute candles of BTC, ETH and SOL, 2025-01-01 03:00 to 2025-02-04 20:19."""


@pytest.fixture(scope="session")
def orpc_client() -> Path:
    """The script that calls with the real oRPC client."""
    return installed_client()


@pytest.fixture(scope="session")
def candles() -> Path:
    """The folder of the real candles."""
    if not any(CANDLES.glob("*.csv*")):
        pytest.skip("the recorded candles are not on this machine")
    return CANDLES
