"""The trial ledger: what counts as a trial on some candles, and the spread of the trials' Sharpe ratios."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trader.backtest.trials import KnownTrials, Trial, read_trials
from trader.core.errors import SettingsError

AT = datetime(2025, 3, 1, tzinfo=UTC)


def trial(model: str = "dip", ratio: float | None = 0.1, **changed: Any) -> Trial:
    fields: dict[str, Any] = {
        "at": AT, "data": ("btc",), "model": model, "ledger": f"{model} {ratio} {changed}", "strategy": "code",
        "params": {}, "seed": 0, "from_": "monday", "to": "friday", "return_percent": 1.0, "sharpe_per_hour": ratio,
    }  # fmt: skip
    return Trial(**(fields | changed))


def test_a_trial_counts_on_every_file_that_it_read_and_once_however_often_it_is_repeated(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    both = trial(data=("btc", "eth"))
    trials = [both, both, trial(ratio=0.3), trial(ratio=None, data=("eth",)), trial(data=("sol",))]
    file.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in trials))
    assert read_trials(file, ["btc"]) == KnownTrials(2, 0.3, None)
    assert read_trials(file, ["eth", "doge"]) == KnownTrials(2, 0.1, None)
    assert read_trials(file, ["doge"]) == KnownTrials(0, None, None)
    file.write_bytes(file.read_bytes() + b'{"at":')
    with pytest.raises(SettingsError, match=r"trials\.jsonl, line 6 is not a trial of a backtest"):
        read_trials(file, ["btc"])


def test_the_spread_is_the_one_of_a_models_configurations_and_not_of_seeds_or_other_models() -> None:
    own = [trial(params={"window": window}, ratio=ratio) for window, ratio in ((10, 0.1), (20, 0.3))]
    seeds = [trial(params={"window": 10}, ratio=ratio, seed=seed) for seed, ratio in ((1, 0.0), (2, 0.2))]
    others = [trial(model, -9.0) for model in ("apex-rules", "grid")]
    known = KnownTrials.of([*own, *seeds, *others])
    assert known.trials == 6
    assert known.best == 0.3
    assert known.spread == pytest.approx(0.02**0.5)
    assert KnownTrials.of([*seeds, *others]).spread is None
