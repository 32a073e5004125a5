"""Where the recorded candles are that some tests trade on; without them these tests skip."""

import os
from pathlib import Path
from typing import Final

FOLDER: Final = Path(os.environ.get("TRADER_TEST_CANDLES", Path(__file__).parents[3] / "shared" / "data"))
"""Files such as BTCUSDT-1m-2025-01.csv.gz: BTC, ETH and SOL, 2025-01-01 03:00 to 2025-02-04 20:19 UTC, no gaps."""
