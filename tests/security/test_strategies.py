"""A strategy's file runs only in its own process: with limits, without secrets, and no longer than allowed."""

import asyncio
import json
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator
from configparser import ConfigParser
from pathlib import Path

import msgspec
import pytest
from support.fault_benches import UNIT

from trader.agents.models_file import read_models
from trader.agents.providers import strategy_process
from trader.agents.providers.strategy_process import Begin, command
from trader.agents.variants import VARIANTS
from trader.core.errors import SettingsError
from trader.core.variant_id import VariantId

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs the program bwrap")
CONFINED = [False, pytest.param(True, marks=needs_bubblewrap)]

OWN = """
import os, resource, socket, sys, time
{top}
class Own:
    def decide(self, view):
        return []
"""
ROW = '[[models]]\nid = "own"\nvariant = "Apex"\nprovider = "strategy"\nrouter_model = "{reference}"\n'


def problems_of(folder: Path, top: str = "", reference: str = "own.py:Own") -> str:
    """Return what is wrong with a models file whose strategy runs this code when it is loaded."""
    (folder / "own.py").write_text(OWN.format(top=top))
    (folder / "models.toml").write_text(ROW.format(reference=reference))
    try:
        read_models(folder / "models.toml", None)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.fixture(params=CONFINED, ids=lambda confined: "confined" if confined else "unconfined")
def confined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether strategies are confined."""
    if not request.param:
        monkeypatch.setattr(strategy_process, "can_confine", lambda: False)
    return bool(request.param)


@pytest.mark.usefixtures("confined")
def test_a_file_is_loaded_in_its_own_process_without_secrets(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-4c1d9b7e55aa")
    assert problems_of(open_folder) == ""
    told = "raise RuntimeError([os.environ.get('OPENROUTER_API_KEY'), 'trader.agents.models_file' in sys.modules])"
    assert "raised RuntimeError: [None, False]" in problems_of(open_folder, told)


@pytest.mark.parametrize("reference", ["../own.py:Own", "/etc/own.py:Own", "link.py:Own", "inner/own.py:Own"])
def test_a_file_outside_of_the_folder_is_not_run(open_folder: Path, reference: str) -> None:
    folder, marker = open_folder / "models", open_folder / "ran"
    folder.mkdir()
    (open_folder / "own.py").write_text(OWN.format(top=f"open({str(marker)!r}, 'w')"))
    (folder / "link.py").symlink_to(open_folder / "own.py")
    (folder / "inner").symlink_to(open_folder)
    assert "is outside of it" in problems_of(folder, reference=reference)
    assert not marker.exists()


@pytest.mark.slow
def test_a_file_that_never_loads_is_ended(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_process, "START_LIMIT_S", 2.0)
    assert "took longer than 2 s to load" in problems_of(open_folder, "time.sleep(3600)")
    os.mkfifo(open_folder / "fifo.py")
    assert "Not a regular file" in problems_of(open_folder, reference="fifo.py:Own")


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("bytearray(5 << 30)", "MemoryError"),
        ("import tempfile; tempfile.TemporaryFile().write(bytes(65 << 20))", "OSError: [Errno 27] File too large"),
        ("raise RuntimeError(resource.getrlimit(resource.RLIMIT_CPU))", "(7200, 7200)"),
        ("raise RuntimeError(resource.getrlimit(resource.RLIMIT_NPROC))", "(512, 512)"),
        ("resource.setrlimit(resource.RLIMIT_CORE, (1, 1))", ""),
    ],
)
def test_a_process_has_limits(open_folder: Path, code: str, reason: str) -> None:
    assert reason in problems_of(open_folder, code)


@needs_bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        "open('.env')", "open({folder!r} + '/lab.env')", "os.listdir('.trader')", "os.listdir({outside!r})",
        "os.listdir('/var/lib')", "os.listdir('/proc/{pid}')",
        "socket.socket(socket.AF_UNIX).connect({outside!r} + '/server')",
    ],
)  # fmt: skip
def test_a_confined_file_sees_no_secrets(open_folder: Path, tmp_path: Path, code: str) -> None:
    """What it cannot see is missing or empty; without the confinement each of these lines finds something."""
    for name in (".env", "lab.env"):
        (open_folder / name).write_text("OPENROUTER_API_KEY=sk-4c1d9b7e55aa")
    (open_folder / ".trader").mkdir()
    (open_folder / ".trader" / "data").touch()
    line = code.format(folder=str(open_folder), outside=str(tmp_path), pid=os.getpid())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        server.listen()
        found = problems_of(
            open_folder,
            f"raise RuntimeError(({line}).read() or 'nothing')"
            if "open" in line
            else (f"raise RuntimeError({line} or 'nothing')"),
        )
    assert re.search("raised (RuntimeError: nothing|FileNotFoundError|PermissionError)", found)


def test_the_unit_allows_the_namespaces_of_the_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd 252 does with these lines; without @mount or one of the namespaces bubblewrap ends with an error."""
    monkeypatch.setattr(strategy_process, "can_confine", lambda: True)
    words = command("/usr/own.py:Own")
    unshared = {word.removeprefix("--unshare-") for word in words if word.startswith("--unshare-")}
    unit = ConfigParser(interpolation=None)
    unit.read(UNIT)
    assert set(unit["Service"]["RestrictNamespaces"].split()) == {"user", "mnt", *unshared}
    assert "@mount" in unit["Service"]["SystemCallFilter"].split()


@pytest.fixture
async def held() -> AsyncIterator[tuple[int, asyncio.Event, asyncio.Event]]:
    """A port, an event that a process has connected, and one that all of its copies of the connection are gone."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], begun, ended
    server.close()


@pytest.mark.parametrize("is_killed", [False, True], ids=["its input ends", "it is killed"])
async def test_what_a_strategy_starts_ends_with_it(
    open_folder: Path, held: tuple[int, asyncio.Event, asyncio.Event], *, confined: bool, is_killed: bool
) -> None:
    port, begun, ended = held
    apart = "os.setsid()" if confined else "pass"  # only a namespace holds a process that leaves its session
    connect = f"s = socket.create_connection(('127.0.0.1', {port}))"
    fork = f"{connect}\nif os.fork() == 0:\n    {apart}\n    time.sleep(3600)\ns.close()"
    (open_folder / "own.py").write_text(OWN.format(top=fork))
    reference = f"{open_folder / 'own.py'}:Own"
    process = await asyncio.create_subprocess_exec(
        *command(reference), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(Begin(reference, {}, VARIANTS[VariantId.APEX].limits, None)) + b"\n")
    assert json.loads(await process.stdout.readline())["error"] is None
    await begun.wait()
    assert not ended.is_set()
    if is_killed:
        os.killpg(process.pid, 9)
    else:
        process.stdin.close()
    async with asyncio.timeout(30):
        await ended.wait()
        process.stdin.close()
        await process.communicate()  # unlike `wait`, until its output is closed, too
