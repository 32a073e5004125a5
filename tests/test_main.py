"""The command and the scripts around it: their output and exit codes."""

import asyncio
import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from trader import app
from trader.__main__ import main
from trader.core.errors import MarketDataError, StartError
from trader.core.logs import configure_logs
from trader.operations.supervisor import Supervisor
from trader.settings.settings import Settings

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty working folder; the logs put back afterwards."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    configure_logs("warning", "json")
    root.handlers[:] = handlers
    root.setLevel(level)


def execute(dsn: str, statement: str) -> None:
    """Execute a statement from outside an event loop."""

    async def run() -> None:
        conn = await asyncpg.connect(dsn)
        await conn.execute(statement)
        await conn.close()

    asyncio.run(run())


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def serve(settings: Settings, supervisor: Supervisor) -> None:
        raise error

    monkeypatch.setattr(app, "serve", serve)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StartError("the database is too old"), "trader cannot start: the database is too old\n"),
        (MarketDataError("BTC.csv line 3: no number"), "trader cannot start: BTC.csv line 3: no number\n"),
    ],
)
def test_what_prevents_the_start_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    fail_with(monkeypatch, error)
    monkeypatch.delenv("PORT", raising=False)
    assert main(["--demo"]) == 1
    shown = capsys.readouterr().err
    assert shown.endswith(said)
    assert "Traceback" not in shown


def test_a_bug_is_not_made_to_look_like_a_wrong_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, OSError(errno.EIO, "input/output error"))
    with pytest.raises(OSError, match="input/output"):
        main(["--demo"])


def test_service_runs_with_the_settings_and_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []

    async def serve(settings: Settings, supervisor: Supervisor) -> None:
        served.append(settings)

    monkeypatch.setattr(app, "serve", serve)
    Path(".env").write_text("SIM_SEED=7\n")
    monkeypatch.delenv("SIM_SEED", raising=False)
    assert main(["--demo"]) == 0
    assert [(settings.demo, settings.seed) for settings in served] == [(True, 7)]


def test_check_connects_and_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("MARKET_SOURCE", "synthetic")
    monkeypatch.setenv("DATABASE_URL_RO", "postgresql://u:s3cr3t@127.0.0.1:1/trader")
    assert main(["--demo", "--check"]) == 0
    shown, warned = capsys.readouterr()
    assert "database: connected" in shown
    assert "halted" not in shown
    assert "DATABASE_URL_RO in the environment is not a setting and has no effect; did you mean DATABASE_URL?" in warned
    assert "s3cr3t" not in warned
    execute(dsn, "INSERT INTO halts (cause, reason, halted_by) VALUES ('drawdown', 'it fell', 'limit')")
    assert main(["--demo", "--check"]) == 0
    assert "halted: all accounts: drawdown: it fell" in capsys.readouterr().out
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:s3cr3t@127.0.0.1:1/trader")
    assert main(["--demo", "--check"]) == 1
    shown = capsys.readouterr().err
    assert "127.0.0.1:1/trader cannot be used now: not reachable" in shown
    assert "s3cr3t" not in shown


# -- scripts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The part of a checkout that the scripts read, outside the working folder."""
    copy = tmp_path / "check out"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def run(script: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(script), *arguments], env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_too_old_python_is_said_plainly(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "cksum", "cat", "env"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    program(tools / "python3", '[ "$1" = --version ] && echo Python 3.9.2 || exit 1')
    for script in ("run", "test"):
        answer = run(checkout / "scripts" / script, PATH=str(tools))
        assert answer.returncode == 1
        assert "needs Python 3.11 or later" in answer.stderr
        assert "Found: Python 3.9.2" in answer.stderr
    assert not (checkout / ".venv").exists()


WITNESS = """[ "$1" = -c ] && exit 0  # asked whether it is new enough
echo "$PWD|$*"
exit ${WITNESS_EXIT:-0}"""


def wanted(checkout: Path) -> str:
    files = (checkout / "pyproject.toml", checkout / "scripts" / "packaging" / "requirements.lock")
    text = b"".join(file.read_bytes() for file in files)
    summed = subprocess.run(["cksum"], input=text, capture_output=True, check=True).stdout.decode().strip()
    return f"{checkout} {summed}\n"


@pytest.fixture
def installed(checkout: Path) -> Path:
    """A checkout whose environment fits, its Python a witness of how it is called."""
    program(checkout / ".venv" / "bin" / "python", WITNESS)
    (checkout / ".venv" / ".installed-run").write_text(wanted(checkout))
    return checkout


def test_run_keeps_the_working_folder_the_arguments_and_the_exit_code(installed: Path, tmp_path: Path) -> None:
    answer = run(installed / "scripts" / "run", "--demo", "two words", PATH=os.environ["PATH"], WITNESS_EXIT="7")
    assert answer.stdout == f"{tmp_path}|-P -m trader --demo two words\n"
    assert answer.returncode == 7
    assert answer.stderr == "", "nothing is made again"


def test_changed_dependencies_are_installed_once(installed: Path) -> None:
    with (installed / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    make = installed / "scripts" / "make_environment"
    stamp = installed / ".venv" / ".installed-run"
    before = stamp.read_text()
    failed = run(make, "run", PATH=os.environ["PATH"], WITNESS_EXIT="1")
    assert failed.returncode == 1
    assert stamp.read_text() == before, "what failed is tried again"
    done = run(make, "run", PATH=os.environ["PATH"])
    assert done.returncode == 0
    lock = installed / "scripts" / "packaging" / "requirements.lock"
    assert "-m pip install --quiet --disable-pip-version-check " in done.stderr
    assert f" --require-hashes --only-binary=:all: -r {lock}\n" in done.stderr
    assert f"--no-deps --no-build-isolation -e {installed}\n" in done.stderr
    assert stamp.read_text() == wanted(installed) != before
    assert run(make, "run", PATH=os.environ["PATH"]).stderr == ""


def test_tests_need_more_than_the_service(installed: Path) -> None:
    make = installed / "scripts" / "make_environment"
    done = run(make, "test", PATH=os.environ["PATH"])
    assert f"-e {installed}[test]\n" in done.stderr
    (installed / ".venv" / ".installed-run").unlink()
    assert run(make, "run", PATH=os.environ["PATH"]).stderr == "", "an environment for tests runs the service too"


def test_environment_of_a_moved_checkout_is_made_anew(installed: Path, tmp_path: Path) -> None:
    moved = installed.rename(tmp_path / "moved")
    witness = tmp_path / "python"
    program(witness, WITNESS)
    done = run(moved / "scripts" / "make_environment", "run", PATH=os.environ["PATH"], PYTHON=str(witness))
    assert f"-m venv --clear {moved}/.venv\n" in done.stdout
    assert f"-e {moved}\n" in done.stderr
