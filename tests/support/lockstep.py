"""A replay in lockstep by a separate service: the rule agents trade recorded candles, as fast as possible."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from support.process import serving
from support.waiting import until

PATIENCE_S = 900


async def replay(folder: Path, dsn: str, candles: Path, begin: str, end: str, **environ: str) -> None:
    """Trade from `begin` to `end`, full minutes, once a minute."""
    folder.mkdir()
    minutes = (datetime.fromisoformat(end) - datetime.fromisoformat(begin)) // timedelta(minutes=1)
    environ = {
        "DATABASE_URL": dsn,
        "MARKET_SOURCE": f"replay:{candles}",
        "SIM_SEED": "0",
        "REPLAY_START": begin,
        "REPLAY_END": end,
        "REPLAY_SPEED": "0",
        **environ,
    }
    async with serving(folder, **environ) as service:

        async def ended() -> Any:
            _, report = await service.get("/health/schedulers")
            is_over = report["market"]["lastUpdateAt"] == end and report["market"]["stale"]
            return is_over and not report["modelsRunning"] and report

        report = await until(ended, within_s=PATIENCE_S)
        failures = {name: scheduler["failures"] for name, scheduler in report["schedulers"].items()}
        assert set(failures.values()) == {0}
        assert report["schedulers"]["tradeExecutor"]["runs"] == minutes + 1
        assert report["schedulers"]["tradeExecutor"]["skipped"] == 0
        assert await service.stop() == 0
        # Health reports when no market has a candle for a while, as in a gap of the recording, and logs it after 5 s.
        assert [line for line in service.traceback().splitlines() if "unhealthy: " not in line] == []
