"""Same-state pairs: decisions in the same moments of a recording, carried out for a horizon and compared by state."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import orjson
import pytest
from support.candles import write_walk
from support.exam_entrants import Cheat, Nothing, TrendTrader, entrant
from support.trading_provider import call, opening, trading_provider

from trader.__main__ import main
from trader.agents.domain.mask import Mask
from trader.backtest.spec import settings_of
from trader.core.errors import SettingsError
from trader.exam.pairs import Horizon, RecordedRoom
from trader.market.sources.replay import ReplaySource

START = datetime(2025, 3, 3, tzinfo=UTC)
MODELS = """
[[models]]
id = "one"
variant = "Apex"
provider = "openai"
router_model = "lab/one"
training_cutoff = 2025-06-30
price = {input = 0.36, output = 2.0}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_walk(folder / "BTCUSDT-1m-2025-03.csv", START, 5 * 1440, price=90_000, seed=1)
    write_walk(folder / "ETHUSDT-1m-2025-03.csv", START, 5 * 1440, price=2_200, seed=2)
    return folder


async def room_of(data: Path, horizon: Horizon = "4h") -> RecordedRoom:
    settings = settings_of({"SIM_SEED": "0", "MARKETS": "BTC,ETH", "REPLAY_THINKING": "off"})
    source = ReplaySource(data, settings.markets, plain_rate=Decimal(0))
    await source.open()
    return RecordedRoom(settings, source, ["15m", "1h"], horizon)


def test_moments_are_drawn_from_every_stratum_before_any_entrant_is_asked(data: Path) -> None:
    room = asyncio.run(room_of(data))
    moments = room.draw("s", 12)
    assert room.draw("s", 12) == moments != room.draw("t", 12)
    assert {datetime.fromtimestamp(each.at, UTC).hour for each in moments} <= {0, 4, 8, 12, 16, 20}
    assert sum(each.standing is not None for each in moments) == 6
    assert len({each.at for each in moments}) == 12
    first, last = min(each.at for each in moments), max(each.at for each in moments)
    assert first >= START.timestamp() + 86_400
    assert last + 4 * 3600 <= START.timestamp() + 5 * 86_400
    with pytest.raises(SettingsError, match="the recording has"):
        room.draw("s", 100)
    days = sorted(each.at for each in asyncio.run(room_of(data, "24h")).draw("s", 2))
    assert days[1] - days[0] >= 86_400, "an outcome does not tell the next one"


def test_outcome_is_the_result_of_the_decision_in_units_of_volatility(data: Path) -> None:
    async def decided() -> None:
        room = await room_of(data)
        for number, moment in enumerate(room.draw("s", 6)):
            traders = (Nothing(), TrendTrader(1), TrendTrader(-1), TrendTrader(1, 2.0), TrendTrader(1, 4.0))
            idle, up, down, large, huge = await room.sit(number, moment, [entrant(each) for each in traders])
            if moment.standing is None:
                assert large.score == pytest.approx(huge.score, abs=0.02), "a larger risk than one unit counts as one"
                assert idle.score == idle.value == 0
                assert -0.004 < up.value + down.value < -0.0016  # opposite trades lose the costs of both
            assert abs(up.score - max(-4.0, up.value / room.volatility(moment.at))) < 1

    asyncio.run(decided())


def test_mask_blinds_a_memory_of_the_recording_and_not_code_that_has_it(data: Path) -> None:
    async def outcomes() -> dict[str, float]:
        room = await room_of(data)
        source = ReplaySource(data, ["BTC", "ETH"], plain_rate=Decimal(0))
        await source.open()
        minutes = {symbol: recording.minutes for symbol, recording in source.recordings.items()}
        closes = {symbol: dict(zip(own.minute, own.close, strict=True)) for symbol, own in minutes.items()}
        first = {symbol: own.close[0] for symbol, own in minutes.items()}
        mask = Mask.hiding(frozenset({"symbols", "dates", "scale"}), first, START)
        cheats = [Cheat(clue, closes, 240) for clue in ("memory", "shape")]
        entrants = [entrant(each, shown) for each in cheats for shown in (None, mask)]
        flat = [each for each in room.draw("s", 12) if each.standing is None]
        sittings = [sitting for at, each in enumerate(flat) for sitting in await room.sit(at, each, entrants)]
        names = {sitting.entrant for sitting in sittings}
        return {name: sum(each.score for each in sittings if each.entrant == name) / len(flat) for name in names}

    known = asyncio.run(outcomes())
    assert known["cheat-memory"] == known["cheat-shape"] == known["cheat-shape:masked"] > 0.5
    assert known["cheat-memory:masked"] == 0


def test_pairs_of_a_recording_are_compared_by_state(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ("--variant", "Trendsurfer", "--variant", "Sovereign", "--states", "8", "--workers", "1")
    assert main(["exam", "run", "--data", str(data), "--out", str(tmp_path / "exam"), *rules, "--json"]) == 0
    result = orjson.loads(capsys.readouterr().out)
    assert len(result["recordingSha256"]) == 64
    assert [each["entrant"] for each in result["entrants"]] == ["trendsurfer-rules", "sovereign-rules", "nothing"]
    assert {pair["states"] for pair in result["comparisons"]} == {8}
    assert main(["exam", "report", str(tmp_path / "exam")]) == 0
    assert "of the volatility" in capsys.readouterr().out
    checking = ("exam", "check", str(tmp_path / "exam"))
    assert main([*checking, "--data", str(data)]) == 0
    assert main([*checking]) == main([*checking, "--data", str(data), "--funding", "0.001"]) == 2
    said = capsys.readouterr().err
    assert "--data is missing: the candles of BTC,ETH" in said
    assert "give the same recording, and the same --funding" in said
    file = tmp_path / "exam" / "sittings.jsonl"
    first = orjson.loads(file.read_bytes().splitlines()[0])
    old, new = (b'"score":%s,' % orjson.dumps(first["score"] + more) for more in (0.0, 0.1))
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    capsys.readouterr()
    assert main([*checking, "--data", str(data), "--json"]) == 1
    wrong, *_ = orjson.loads(capsys.readouterr().out)["wrong"]
    assert wrong.startswith("state 0, trendsurfer-rules: score is")


def test_model_that_may_know_the_moments_is_refused_without_a_mask(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-000000000000000001")
    (tmp_path / "models.toml").write_text(MODELS)
    asked = ("--models", str(tmp_path / "models.toml"), "--budget-usd", "1", "--states", "4")
    assert main(["exam", "run", "--data", str(data), "--out", str(tmp_path / "exam"), *asked]) == 2
    said = capsys.readouterr().err
    assert "one: the moments begin at 2025-03-0" in said
    assert "--mask symbols,dates,scale" in said
    assert not (tmp_path / "exam").exists()


def test_masked_model_sees_no_symbol_and_no_date_of_the_recording(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.toml").write_text(MODELS.replace("2025-06-30", "2025-01-31"))
    with trading_provider() as provider:
        provider.always = [call(1, "createPosition", **opening("M01", 0.05))]
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test-000000000000000001")
        asked = ("--models", str(tmp_path / "models.toml"), "--budget-usd", "1", "--states", "3", "--json")
        masked = ("--mask", "symbols,dates,scale", "--horizon", "1h")
        assert main(["exam", "run", "--data", str(data), "--out", str(tmp_path / "exam"), *asked, *masked]) == 0
    entrants = orjson.loads(capsys.readouterr().out)["entrants"]
    assert [each["entrant"] for each in entrants] == ["one", "one:masked", "nothing"]
    views = [each["messages"][1]["content"] for each in provider.asked]
    assert all("You are asked every 60 minutes" in each["messages"][0]["content"] for each in provider.asked)
    hidden = [view for view in views if "M01" in view]
    assert len(hidden) == len(views) / 2
    assert not any("BTC" in view or "2025-03" in view for view in hidden)
    lines = [orjson.loads(line) for line in (tmp_path / "exam" / "sittings.jsonl").read_bytes().splitlines()]
    traded = [each["answer"]["decided"][0]["steps"][0]["calls"][0] for each in lines if each["entrant"] == "one:masked"]
    assert {each["arguments"]["symbol"] for each in traded} == {"BTC"}
