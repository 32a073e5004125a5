"""The `backtest` command: its files, its errors, and its output after Ctrl+C."""

import errno
import hashlib
import os
import re
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.candles import write_walk
from support.reports import report_data

from trader.__main__ import main
from trader.backtest.output import LedgerLines, Reserve
from trader.backtest.run import Backtest
from trader.backtest.trials import data_digests, read_trials

START = datetime(2025, 3, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two markets of thirty hours, one with a funding file."""
    folder = tmp_path_factory.mktemp("data")
    write_walk(folder / "BTCUSDT-1m-2025-03.csv", START, 1_800, price=90_000, seed=1)
    write_walk(folder / "ETHUSDT-1m-2025-03.csv", START, 1_800, price=2_200, seed=2)
    hour = int((START + timedelta(hours=16)).timestamp() * 1000)
    (folder / "ETHUSDT-fundingRate-2025-03.csv").write_text(
        f"calc_time,funding_interval_hours,last_funding_rate\n{hour},8,0.0002\n"
    )
    return folder


def backtest(data: Path, out: Path, *options: str) -> int:
    """Run without a database, which the tests of the whole service cover."""
    begin = ("--no-database", "--from", "2025-03-01T12:00:00Z")
    return main(["backtest", "--data", str(data), "--out", str(out), *begin, *options])


LATE_BUYER = """
from trader.strategies import CreatePosition, Side, Strategy

class LateBuyer(Strategy):
    warm_up = 20

    def decide(self, view):
        held = {position.symbol for position in view.positions}
        for symbol, market in view.markets.items():
            wanted = symbol == "SOL" or (view.at.hour >= 17 and "SOL" not in view.markets)
            if wanted and symbol not in held:
                stop = float(market.price) * 0.9
                yield CreatePosition(symbol=symbol, side=Side.LONG, quantity=500 / float(market.price), leverage=1,
                                     stop=stop, invalidation="none", confidence=50)
"""


def test_a_market_that_begins_or_ends_within_a_run_is_traded_meanwhile_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_walk(tmp_path / "BTCUSDT-1m-2025-03.csv", START, 1_800, price=90_000, seed=1)
    write_walk(tmp_path / "SOLUSDT-1m-2025-03.csv", START, 960, price=150, seed=2)
    write_walk(tmp_path / "ETHUSDT-1m-2025-03.csv", START + timedelta(hours=14), 900, price=2_200, seed=3)
    (tmp_path / "late.py").write_text(LATE_BUYER)
    markets = [option for symbol in ("BTC", "ETH", "SOL") for option in ("--market", symbol)]
    options = ("--strategy", f"{tmp_path / 'late.py'}:LateBuyer", *markets, "--cadence", "15m")
    assert backtest(tmp_path, tmp_path / "out", *options) == 0
    result = orjson.loads((tmp_path / "out" / "result.json").read_bytes())
    assert (result["complete"], result["to"]) == (True, "2025-03-02T05:59:59.000Z")
    ended = "2025-03-01T15:59:59.000Z"
    assert result["listings"] == {
        "ETH": {"beginsAt": "2025-03-01T14:00:00.000Z", "endsAt": "2025-03-02T04:59:59.000Z"},
        "SOL": {"beginsAt": None, "endsAt": ended},
    }
    said = f"SOL ends at {ended}, within the run; positions in it were closed at its last mark."
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "out" / "report.html").read_text()
    rows = [orjson.loads(line)["row"] for line in (tmp_path / "out" / "ledger.jsonl").read_bytes().splitlines()]
    closed = {(row["symbol"], row["close_reason"], row["closed_at"]) for row in rows if row.get("status") == "CLOSED"}
    assert closed == {("SOL", "ended", "2025-03-01T15:59:59Z"), ("ETH", "ended", "2025-03-02T04:59:59Z")}
    assert {row["symbol"] for row in rows if row.get("status") == "OPEN"} == {"BTC", "ETH", "SOL"}


@pytest.mark.slow
def test_two_runs_write_the_same_ledger_and_its_digest(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--capital", "5000", "--taker-fee", "4", "--to", "2025-03-01T18:00:00Z")
    assert backtest(data, tmp_path / "one", *options, "--json") == 0
    printed = orjson.loads(capsys.readouterr().out)
    markets = ("--market", "ETH", "--market", "BTC")
    assert backtest(data, tmp_path / "two", *options, *markets) == 0
    ledger = (tmp_path / "one" / "ledger.jsonl").read_bytes()
    assert ledger == (tmp_path / "two" / "ledger.jsonl").read_bytes()
    assert printed == orjson.loads((tmp_path / "one" / "result.json").read_bytes())
    assert printed["ledgerSha256"] == hashlib.sha256(ledger).hexdigest()
    assert printed["ledgerSha256"] in capsys.readouterr().out
    assert printed["complete"] is True
    decided = [orjson.loads(line) for line in (tmp_path / "one" / "decisions.jsonl").read_bytes().splitlines()]
    assert {line["modelId"] for line in decided} >= {"trendsurfer-rules"}
    shown = report_data(tmp_path / "one" / "report.html")
    returns = {entrant["modelId"]: entrant["returnPercent"] for entrant in shown["evidence"]["entrants"]}
    assert returns == pytest.approx({account["id"]: account["returnPercent"] for account in printed["accounts"]})
    assert printed["funding"] == {"fromFiles": ["ETH"], "hourlyRates": {"BTC": 0.0000125}}
    rows = [orjson.loads(line) for line in ledger.splitlines()]
    assert {row["table"] for row in rows} >= {"runs", "orders", "fills", "funding_payments", "order_requests"}
    assert {row["row"]["initial_capital"] for row in rows if row["table"] == "runs"} == {"5000"}
    accounts = {account["id"]: account for account in printed["accounts"]}
    largest = printed["capacity"]["BTC"]["largestExecution"]
    fills = [row["row"] for row in rows if row["table"] == "fills" and row["row"]["symbol"] == "BTC"]
    assert (printed["capacity"]["BTC"]["calmDepth"], printed["capacity"]["BTC"]["surchargeBps"]) == (300_000, 0)
    assert max(float(fill["quantity"]) * float(fill["price"]) for fill in fills) <= largest < 50_000
    assert len(accounts) == 4
    for account in accounts.values():
        assert account["decisions"] == 6 * 60 + 1
        own = [row["row"] for row in rows if row["row"]["account_id"] == account["id"]]
        closed = {row["id"] for row in own if row.get("status") == "CLOSED"}
        assert account["trades"] == len(closed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from", "2025-02-28T23:59:00Z"), "--from is 2025-02-28T23:59:00.000Z, which is before that"),
        (("--to", "2025-03-09T00:00:00Z"), "--to is 2025-03-09T00:00:00.000Z, which is beyond that"),
        (("--to", "2025-03-01T11:00:00Z"), "--to: expected a time after --from"),
        (
            ("--from", "2025-03-09T00:00:00Z"),
            "--from and --to leave nothing to play: they are 2025-03-09T00:00:00.000Z",
        ),
    ],
)
def test_a_period_beyond_the_data_is_refused_in_terms_of_the_options(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert backtest(data, tmp_path / "run", *options) in (1, 2)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_missing_folder_of_candles_is_named_by_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert backtest(tmp_path / "none", tmp_path / "run", "--market", "BTC") == 2
    assert f"--data: expected an existing folder or file of candles, got '{tmp_path}/none'" in capsys.readouterr().err


@pytest.mark.slow
def test_variants_markets_funding_and_cadence_can_be_chosen(data: Path, tmp_path: Path) -> None:
    options = ("--variant", "Apex", "--market", "BTC", "--funding", "0.0001", "--cadence", "15m", "--latency", "0")
    assert backtest(data, tmp_path / "run", *options) == 0
    result = orjson.loads((tmp_path / "run" / "result.json").read_bytes())
    assert result["markets"] == ["BTC"]
    assert result["accounts"][0]["deflated"] is None or result["accounts"][0]["deflated"]["trials"] == 1
    assert len((tmp_path / "trials.jsonl").read_bytes().splitlines()) == 1
    assert result["funding"] == {"fromFiles": [], "hourlyRates": {"BTC": 0.0001}}
    assert [(account["id"], account["decisions"]) for account in result["accounts"]] == [("apex-rules", 18 * 4 + 1)]
    # A second market makes another trial on the candles of the first, and a masked copy makes none.
    assert backtest(data, tmp_path / "more", "--variant", "Apex", "--mask", "dates", "--cadence", "15m") == 0
    digests = [data_digests(data, [symbol]) for symbol in ("BTC", "ETH")]
    assert [read_trials(tmp_path / "trials.jsonl", each, 1).trials for each in digests] == [2, 1]


def test_a_broken_ledger_of_trials_is_refused_before_the_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trials.jsonl").write_text("{}\n")
    assert backtest(data, tmp_path / "run") == 2
    assert "trials.jsonl, line 1 is not a trial of a backtest" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_ctrl_c_leaves_a_result_marked_as_interrupted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Backtest.run

    def interrupted(run: Backtest) -> Iterator[datetime]:
        for number, reached in enumerate(whole(run)):
            if number == 200:
                signal.raise_signal(signal.SIGINT)
            yield reached

    monkeypatch.setattr(Backtest, "run", interrupted)
    assert backtest(data, tmp_path / "run") == 130
    result = orjson.loads((tmp_path / "run" / "result.json").read_bytes())
    assert result["complete"] is False
    assert result["to"] < "2025-03-01T16:00"
    assert "Interrupted" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").exists()


class SmallDisk(FileIO):
    """A file on a disk that is full after some bytes, until space is freed."""

    room = 20_000

    def write(self, content: Any, /) -> int:
        part = bytes(content)[: max(0, SmallDisk.room - self.tell())]
        if content and not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(part)


def test_a_full_disk_ends_the_run_names_the_line_and_leaves_complete_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_soon(file: FileIO) -> LedgerLines:
        return LedgerLines(SmallDisk(file.fileno(), "w", closefd=False))

    def give_back(reserve: Reserve) -> None:
        SmallDisk.room = 10**9

    monkeypatch.setattr(SmallDisk, "room", SmallDisk.room)
    monkeypatch.setattr(Reserve, "free", give_back)
    monkeypatch.setattr("trader.backtest.output.BUFFER_MAX", 4_000)
    monkeypatch.setattr("trader.backtest.execution.LedgerLines", full_soon)
    run = tmp_path / "run"
    assert backtest(data, run) == 1
    result, ledger = orjson.loads((run / "result.json").read_bytes()), (run / "ledger.jsonl").read_bytes()
    assert result["complete"] is False
    assert result["to"] < "2025-03-02T00:00"
    assert re.search(r"ledger.jsonl, after line \d+ \(byte \d+\): .*No space left on device", result["ended"])
    assert result["ended"] in capsys.readouterr().out
    assert result["ledgerSha256"] == hashlib.sha256(ledger).hexdigest()
    assert len(ledger) > 10_000
    decided = [orjson.loads(line)["startedAt"] for line in (run / "decisions.jsonl").read_bytes().splitlines()]
    assert decided
    assert max(decided) <= result["to"], "decisions are whole up to where the ledger is"
    assert all(orjson.loads(line)["table"] for line in ledger.splitlines())
    assert report_data(run / "report.html")["kind"] == "Backtest"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--cadence", "7x"), 2, "--cadence is '7x'"),
        (("--cadence", "10s"), 2, "--cadence is 10s, below a minute: only on a recording of books"),
        (("--taker-fee", "much"), 2, "--taker-fee"),
        (("--funding", "2"), 2, "--funding is '2'"),
        (("--funding", "nan"), 2, "--funding is 'nan'"),
        (("--market", "DOGE"), 1, "DOGE"),
        (("--to", "2024-01-01T00:00:00Z"), 2, "--to"),
        (("--mask", "dates", "--seeds", "2"), 2, "not with AI models, agents or --mask"),
    ],
)
def test_wrong_options_are_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int, words: str
) -> None:
    assert backtest(data, tmp_path / "run", *options) == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_mask_names_its_parts_and_needs_no_database(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backtest(data, tmp_path / "run", "--mask", "dates,colour") == 2
    assert "expected some of symbols, dates, scale" in capsys.readouterr().err
    assert main(["backtest", "--data", str(data), "--out", str(tmp_path / "run"), "--mask", "dates"]) == 2
    assert "--mask: only with --no-database" in capsys.readouterr().err


def test_a_broken_row_a_recording_and_an_existing_folder_are_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (data / "BTCUSDT-1m-2025-03.csv").read_text().splitlines()
    lines[700] = lines[700].rpartition(",")[0] + ",x"
    broken = tmp_path / "BTCUSDT-1m.csv"
    broken.write_text("\n".join(lines))
    assert main(["backtest", "--data", str(broken), "--out", str(tmp_path / "run")]) == 1
    assert f"{broken}, line 701: 'x' is not a number" in capsys.readouterr().err
    recording = tmp_path / "recording"
    recording.mkdir()
    (recording / "2025-03-01T00.jsonl.gz").touch()
    assert backtest(recording, tmp_path / "run") == 1
    assert f"{recording} holds no recording: expected a file" in capsys.readouterr().err
    assert backtest(data, tmp_path) == 1
    assert "exists already" in capsys.readouterr().err
