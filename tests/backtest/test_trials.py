"""The trial ledger: what counts as a trial on some candles, and the spread of the trials' Sharpe ratios."""

import math
from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import msgspec
import pytest
from support.candles import write_walk

from trader.backtest import run_backtest
from trader.backtest.trials import KnownTrials, Trial, read_trials, whole_hours
from trader.core.errors import SettingsError
from trader.strategies import ClosePosition, CreatePosition, Side, Strategy, View

AT = datetime(2025, 3, 1, tzinfo=UTC)


def trial(model: str = "dip", ratio: float | None = 0.1, **changed: Any) -> Trial:
    fields: dict[str, Any] = {
        "at": AT, "data": ("btc",), "model": model, "ledger": f"{model} {ratio} {changed}", "strategy": "code",
        "params": {}, "seed": 0, "from_": AT, "to": AT + timedelta(days=4), "return_percent": 1.0,
        "sharpe_per_hour": ratio,
    }  # fmt: skip
    return Trial(**(fields | changed))


def test_a_trial_counts_on_every_file_that_it_read_and_once_however_often_it_is_repeated(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    both = trial(data=("btc", "eth"))
    trials = [both, both, trial(ratio=0.3), trial(ratio=None, data=("eth",)), trial(data=("sol",))]
    file.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in trials))
    assert read_trials(file, ["btc"], 96) == KnownTrials(2, 0.3, None)
    assert read_trials(file, ["eth", "doge"], 96) == KnownTrials(2, 0.1, None)
    assert read_trials(file, ["doge"], 96) == KnownTrials(0, None, None)
    file.write_bytes(file.read_bytes() + b'{"at":')
    with pytest.raises(SettingsError, match=r"trials\.jsonl, line 6 is not a trial of a backtest"):
        read_trials(file, ["btc"], 96)


def test_the_spread_is_the_one_of_a_models_configurations_and_not_of_seeds_or_other_models() -> None:
    own = [trial(params={"window": window}, ratio=ratio) for window, ratio in ((10, 0.1), (20, 0.3))]
    seeds = [trial(params={"window": 10}, ratio=ratio, seed=seed) for seed, ratio in ((1, 0.0), (2, 0.2))]
    others = [trial(model, -9.0) for model in ("apex-rules", "grid")]
    known = KnownTrials.of([*own, *seeds, *others], 96)
    assert known.trials == 6
    assert known.best == 0.3
    assert known.spread == pytest.approx(0.02**0.5)
    assert KnownTrials.of([*seeds, *others], 96).spread is None


def test_the_ratios_of_shorter_trials_are_no_luckier_than_those_of_the_run_that_they_judge() -> None:
    trials = [trial(params={"window": window}, ratio=ratio) for window, ratio in ((10, 0.1), (20, 0.3))]
    over_a_month = KnownTrials.of(trials, 4 * 96)
    assert over_a_month.best == 0.15, "over four times the hours, luck is half as large"
    assert over_a_month.spread == pytest.approx(0.02**0.5 / 2)
    equal = [trial(ratio=ratio, to=AT + timedelta(hours=hours, seconds=-1)) for ratio, hours in ((0.2, 24), (0.1, 96))]
    assert KnownTrials.of(equal, 24).spread == 0.0


@pytest.mark.parametrize(
    ("start", "hours", "joined"),
    [
        (0, 24, {24}),  # the snapshot of its end belongs to no hour of it
        (0, 24.5, {24}),
        (0.5, 24, {24}),
        (0.5, 24.25, {1}),
        (0.25, 24.25, {24}),
        (0.5, 23.25, {1}),
        (0.5, 23.5, {1, 24}),
        (0.75, 0.5, {1}),
        (0, 0.5, set()),
    ],
)
def test_a_part_of_an_hour_is_no_hour_of_its_own(start: float, hours: float, joined: set[int]) -> None:
    end = start + hours
    begins_at, ends_at = (AT + timedelta(hours=each) for each in (start, end))
    inner = [float(hour) for hour in range(1, math.floor(end) + 1)]
    kept = [each for each in inner if each not in joined]
    assert whole_hours([start, *inner, -1.0], begins_at, ends_at) == [start, *kept, -1.0]


class Hourly(Strategy):
    """Is long during even hours."""

    def decide(self, view: View) -> Any:
        price = float(view.markets["BTC"].price)
        if view.position("BTC") is not None:
            return ClosePosition(symbol="BTC") if view.at.hour % 2 else None
        return None if view.at.hour % 2 else CreatePosition(
            symbol="BTC", side=Side.LONG, quantity=float(view.account.equity) / price, leverage=2, stop=price * 0.8,
            invalidation="none", confidence=50,
        )  # fmt: skip


def test_the_figures_of_a_day_are_those_of_its_24_hours(tmp_path: Path) -> None:
    write_walk(tmp_path / "BTCUSDT-1m-2025-03.csv", AT, 1_620, price=90_000, seed=1)

    def run(end: datetime) -> tuple[dict[str, Any], list[float]]:
        """Return the figures, and the last equity of each hour until the end, from the table."""
        ledger = tmp_path / "trials.jsonl"
        result = run_backtest(Hourly, tmp_path, cadence="15m", start=start, end=end, trials=ledger)
        own = result.equity[result.equity["account"] == "hourly"]
        hours = round((end - start) / timedelta(hours=1))
        ends = [start + timedelta(hours=number, minutes=-1) for number in range(1, hours)] + [end + timedelta(hours=1)]
        times, values = [each.to_pydatetime() for each in own["at"]], own["equity"].tolist()
        return result.value["accounts"][0], [10_000.0, *(values[bisect_right(times, each) - 1] for each in ends)]

    start = AT + timedelta(hours=2)
    figures, values = run(start + timedelta(hours=24, seconds=-1))
    returns = [after / before - 1 for before, after in pairwise(values)]
    assert len(returns) == 24
    assert len({round(each, 6) for each in returns}) > 12, "it trades"
    assert figures["hourlyReturns"] == pytest.approx(returns)
    assert figures["sharpePerHour"] == pytest.approx(mean(returns) / stdev(returns))
    assert figures["deflated"]["sharpePerHour"] == figures["sharpePerHour"]
    downside = math.sqrt(sum(min(each, 0) ** 2 for each in returns) / 24)
    assert figures["sortinoPerHour"] == pytest.approx(mean(returns) / downside)
    fall = max(1 - value / peak for value, peak in zip(values, accumulate(values, max), strict=True))
    assert figures["calmar"] == pytest.approx(((values[-1] / values[0]) ** 365 - 1) / fall)
    assert values[-1] == pytest.approx(float(figures["equity"]))
    figures, _ = run(start + timedelta(hours=23, seconds=-1))
    assert len(figures["hourlyReturns"]) == 23
    assert figures["sharpePerHour"] is figures["deflated"] is None
