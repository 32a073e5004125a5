"""Folders that a stranger made are data: a command refuses at once and by name what is none, and writes only there."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trader.__main__ import main
from trader.agents.providers.cassette import Cassette
from trader.backtest.trials import check_trials
from trader.core.errors import MarketDataError, SettingsError, StartError, TraderError
from trader.market.sources.files import read_file
from trader.market.sources.recorder import read_lines
from trader.market.sources.rows import read_rows
from trader.settings.toml_lines import read_toml

SECONDS_MAX = 5
"""Machines that test are slow; a file that is read to its end takes minutes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exam with a report."""
    folder = tmp_path_factory.mktemp("made") / "exam"
    assert main(["exam", "run", "--variant", "Apex", "--states", "2", "--workers", "1", "--out", str(folder)]) == 0
    assert main(["exam", "report", str(folder)]) == 0
    return folder


@pytest.fixture
def exam(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "exam")


def changed(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def to_link(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    (file.parent.parent / "secret-of-mine").write_bytes(content)
    file.symlink_to(file.parent.parent / "secret-of-mine")


def to_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def to_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def to_depths(file: Path) -> None:
    file.write_text('{"a":' * 100_000 + "1" + "}" * 100_000 + "\n")


def to_endless(file: Path) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)


@pytest.mark.parametrize("spoil", [to_link, to_fifo, to_device, to_depths, to_endless])
@pytest.mark.parametrize("name", ["exam.json", "secret", "sittings.jsonl", "card.json"])
def test_an_exam_that_is_no_data_cannot_be_read(
    exam: Path, name: str, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    if (name, spoil) == ("secret", to_depths):
        return  # a text as any other, which differs
    spoil(exam / name)
    began = time.monotonic()
    assert main(["exam", "check", str(exam)]) == 2
    assert time.monotonic() - began < SECONDS_MAX
    [line] = capsys.readouterr().err.splitlines()
    assert str(exam) in line


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"samples": 10**15}, "damaged exam: Expected `int`"),
        ({"samples": 0}, "damaged exam"),
        ({"models": []}, "damaged exam"),
        ({"edges": []}, "damaged exam"),
        ({"settings": {"MARKETS_FILE": "/dev/zero"}}, "no exam has the settings MARKETS_FILE"),
        ({"settings": {"NOTIFY_URL": "https://example.org"}}, "no exam has the settings NOTIFY_URL"),
        ({"recording": "0" * 64, "settings": {}}, "no MARKETS"),
    ],
)
def test_a_plan_says_only_what_plans_say(
    exam: Path, fields: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(exam / "exam.json", **fields)
    assert main(["exam", "check", str(exam)]) == 2
    assert reason in capsys.readouterr().err


def test_a_report_takes_the_place_of_links(exam: Path, tmp_path: Path) -> None:
    keys = tmp_path / "authorized_keys"
    for name in ("card.json", "card.schema.json", "report.html"):
        keys.write_text("mine")
        (exam / name).unlink()
        (exam / name).symlink_to(keys)
        assert main(["exam", "report", str(exam)]) == 0
        assert keys.read_text() == "mine"
        assert (exam / name).is_file()
        assert not (exam / name).is_symlink()


def test_what_differs_is_told_from_what_cannot_be_read(exam: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exam", "check", str(exam)]) == 0
    (exam / "secret").write_text("another")
    assert main(["exam", "check", str(exam)]) == 1
    assert "is not the secret of this exam" in capsys.readouterr().out
    for command in (["exam", "check", "nowhere"], ["season", "check", "nowhere"], ["compare", "nowhere", "there"]):
        assert main(command) == 2, command


READERS: dict[str, Callable[[Path], Any]] = {
    "answers.jsonl": lambda file: Cassette(file.parent),
    "models.json": lambda file: Cassette(file.parent),
    "trials.jsonl": check_trials,
    "BTCUSDT-1m-2025-01.csv": read_file,
    "BTCUSDT-1m-2025-01.csv.gz": read_file,
    "BTCUSDT-1m-2025-01.zip": read_file,
    "2025-01-01T00.jsonl.gz": lambda file: list(read_lines(file)),
    "markets.toml": read_rows,
    "models.toml": read_toml,
}


@pytest.mark.parametrize("spoil", [to_link, to_fifo, to_device, to_depths, to_endless])
@pytest.mark.parametrize("name", READERS)
def test_files_that_are_no_data_are_refused_by_name(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    file = tmp_path / "given" / name
    file.parent.mkdir()
    file.touch()
    spoil(file)
    began = time.monotonic()
    with pytest.raises((SettingsError, StartError, MarketDataError)) as refused:
        READERS[name](file)
    assert time.monotonic() - began < SECONDS_MAX
    assert str(file.parent) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("models.toml", ".".join("a" * 100_000) + " = 1"),
        ("models.toml", "[" + " . ".join(["'a b'"] * 30_000) + "]"),
        ("models.toml", "a = " + "1" * 100_000),
        ("models.toml", "a = " + "[" * 100_000),
        ("markets.toml", "[[markets]]\n" + ".".join("a" * 100_000) + " = 1"),
        ("markets.toml", "a = " + "{a=" * 50_000),
        ("BTCUSDT-1m-2025-01.csv", "1735689600000,1,1,1,1," + "1" * 200_000 + "\n"),
        ("BTCUSDT-1m-2025-01.csv", "1735689600000,1,1,1,1,1e999\n"),
        ("BTCUSDT-1m-2025-01.csv", "1735689600000,1,1,1,NaN,1\n"),
        ("BTCUSDT-1m-2025-01.csv", "9" * 400 + ",1,1,1,1,1\n"),
        ("BTCUSDT-1m-2025-01.csv", "1735689600000,1,1,1,1,1\n" + "\n" * 5_000_000),
    ],
    ids=lambda text: text[:12],
)
def test_texts_that_take_long_are_refused_at_once(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    began = time.monotonic()
    with pytest.raises(TraderError, match=name):
        READERS[name](tmp_path / name)
    assert time.monotonic() - began < SECONDS_MAX
