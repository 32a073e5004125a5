"""Every file that the product appends to holds whole lines after a full disk, and belongs to one process at a time."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from support.documents import ROOT
from support.full_disk import files_no_larger_than

from trader.__main__ import main
from trader.agents.domain.conversation import ModelAnswer
from trader.agents.providers.cassette import ANSWERS, Cassette, KeptAnswer
from trader.core.errors import SettingsError, SinkUnavailable
from trader.core.files import append_lines
from trader.exam import folder as exams
from trader.record.anchors import FileSink
from trader.record.domain.chain import Anchor

AT = datetime(2025, 1, 6, tzinfo=UTC)

APPENDING = {
    "agents/providers/cassette.py": "answers",
    "backtest/output.py": "the lines of a backtest",
    "backtest/trials.py": "trials",
    "backtest/workers.py": "trials of a cluster",
    "exam/folder.py": "sittings",
    "market/sources/downloads.py": "the part of a download, which its checksum judges",
    "record/anchors.py": "anchors",
}
OTHERS = {
    "agents/providers/strategy_process.py": "a pipe",
    "backtest/execution.py": "opens the lines of a backtest",
    "commands/backup.py": "a lock",
    "core/files.py": "the functions themselves",
    "database/embedded/folders.py": "a lock",
    "database/embedded/dumps.py": "a checksum, without which the dump is refused",
    "database/embedded/server.py": "the server's own log",
    "market/sources/published.py": "a new file, written at once",
    "market/sources/recorder.py": "recordings, whose last line may be cut",
}
OPENING = re.compile(r"""open\([^()\n]*["'](a|r\+|x)[bt+]*["']|O_APPEND|buffering=0""")


def test_files_are_appended_to_in_one_way() -> None:
    """Another module that appends to a file is to use these functions, and joins the tests below."""
    package = ROOT / "trader"
    texts = {str(file.relative_to(package)): file.read_text() for file in package.rglob("*.py")}
    using = re.compile("files import .*append|^    append,$", re.MULTILINE)
    assert {name for name, text in texts.items() if using.search(text)} == APPENDING.keys()
    assert {name for name, text in texts.items() if OPENING.search(text)} - APPENDING.keys() == OTHERS.keys()


class Appender(NamedTuple):
    """A file, what appends a line to it, what closes it, and what opens it once more, as another process would."""

    file: Path
    add: Callable[[], None]
    close: Callable[[], None]
    begin_another: Callable[[], object]


def trials(folder: Path) -> Appender:
    file = folder / "trials.jsonl"
    return Appender(file, lambda: append_lines(file, b'{"params": "many"}\n' * 9), lambda: None, lambda: None)


def anchors(folder: Path) -> Appender:
    sink = FileSink(f"file://{folder}/anchors")
    return Appender(
        folder / "anchors", lambda: asyncio.run(sink.send(Anchor(1, bytes(32), AT))), lambda: None, lambda: None
    )


def answers(folder: Path) -> Appender:
    cassette = Cassette(folder)
    cassette.open([])
    answer = ModelAnswer(text="holding", calls=(), message={}, model="one")
    kept = KeptAnswer(digest="d", model="one", at=AT, step=1, cost_usd=None, answer=answer)
    return Appender(folder / ANSWERS, lambda: cassette.add_now(kept), cassette.close, lambda: Cassette(folder).open([]))


def exam_sittings(folder: Path) -> Appender:
    options = ["exam", "run", "--variant", "Apex", "--states", "1", "--workers", "1", "--out", str(folder / "exam")]
    assert main(options) == 0
    plan, _ = exams.read_plan(folder / "exam")
    sheet = exams.Sheet(folder / "exam", plan)
    state = sheet.sittings[-1:]

    def begin_another() -> None:
        assert main(options) == 1
        exams.Sheet(folder / "exam", plan)

    return Appender(folder / "exam" / exams.SITTINGS, lambda: sheet.add(state), sheet.close, begin_another)


@pytest.mark.parametrize("opened", [trials, anchors, answers, exam_sittings])
def test_a_full_disk_leaves_whole_lines_and_an_error(opened: Callable[[Path], Appender], tmp_path: Path) -> None:
    file, add, close, _ = opened(tmp_path)
    add()
    whole = file.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    for kept in (1, len(line) // 2):
        limit = files_no_larger_than(len(whole) + kept)
        with limit, pytest.raises((OSError, SinkUnavailable), match="large"):
            add()
        assert file.read_bytes() == whole
    add()
    close()
    assert file.read_bytes().startswith(whole + line)


@pytest.mark.parametrize("opened", [answers, exam_sittings])
def test_a_second_process_takes_no_file_from_the_first(opened: Callable[[Path], Appender], tmp_path: Path) -> None:
    file, add, close, begin_another = opened(tmp_path)
    before = file.read_bytes()
    with pytest.raises((OSError, SettingsError), match=r"[Aa]nother process"):
        begin_another()
    add()
    close()
    assert file.read_bytes().startswith(before)
    assert len(file.read_bytes()) > len(before)


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    """A process whose write fails takes back its own part only, and a cut line of a killed one harms no other."""
    file = tmp_path / "trials.jsonl"
    file.write_bytes(b'{"cut": ')
    with ProcessPoolExecutor(2) as processes:
        list(processes.map(append_lines, [file] * 40, [b"%d" % number * 9_000 + b"\n" for number in range(40)]))
    first, *lines = file.read_bytes().splitlines()
    assert first == b'{"cut": '
    assert sorted(lines) == sorted(b"%d" % number * 9_000 for number in range(40))


def test_an_exam_that_another_process_has_begun_keeps_its_plan_and_secret(tmp_path: Path) -> None:
    options = ["exam", "run", "--variant", "Apex", "--states", "1", "--workers", "1", "--out", str(tmp_path)]
    assert main(options) == 0
    plan, secret = exams.read_plan(tmp_path)
    with pytest.raises(SettingsError, match="another process has begun an exam"):
        exams.begin(tmp_path, plan, "another")
    assert exams.read_plan(tmp_path) == (plan, secret)
