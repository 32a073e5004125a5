"""Fixtures of the end-to-end tests."""

from pathlib import Path

import pytest
from support.candles import FOLDER
from support.orpc import installed_client


@pytest.fixture(scope="session")
def orpc_client() -> Path:
    """The script that makes calls with the real oRPC client."""
    return installed_client()


@pytest.fixture(scope="session")
def candles() -> Path:
    """The folder of the real candles."""
    if not any(FOLDER.glob("*.csv*")):
        pytest.skip("the recorded candles are not on this machine")
    return FOLDER
