"""A strategy's file runs only in its own process, which holds a hostile one by each channel."""

import asyncio
import json
import os
import shutil
import socket
from ast import literal_eval
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from support.process import ROOT

from trader.agents.models_file import read_models
from trader.agents.providers import confinement, strategy_process
from trader.agents.providers.strategy_process import Begin, StrategyProcess, command, start_strategy
from trader.agents.variants import VARIANTS
from trader.core.errors import ProviderError, SettingsError
from trader.core.variant_id import VariantId
from trader.strategies import build_view

pytestmark = pytest.mark.processes

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs the program bwrap")
CONFINED = [False, pytest.param(True, marks=needs_bubblewrap)]

OWN = """
import ctypes, glob, os, resource, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from trader.strategies import Holding

def answer(text):  # in place of the process
    files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{name}}")]
    pipes = [file for file in files if os.readlink(f"/proc/self/fd/{{file}}")[:4] in ("pipe", "sock")]
    os.write(max(pipes), text.encode() + b"\\n")

def fork(work):
    if os.fork() == 0:
        work()
        os._exit(0)

def call(*arguments):
    return ctypes.CDLL(None, use_errno=True).syscall(*arguments)

{top}

class Own:
    deadline_s = 3
    def decide(self, view):
        told = "held"
        {inner}
        return Holding(reason=str(told)[:1000] or "nothing")
"""
ROW = '[[models]]\nid = "own"\nvariant = "Apex"\nprovider = "strategy"\nrouter_model = "{reference}"\n'
VIEW = build_view({"BTC": [1, 2]})
SECRET = "sk-4c1d9b7e55aa"


def problems_of(folder: Path, top: str = "", reference: str = "own.py:Own") -> str:
    """Return what is wrong with a models file whose strategy runs this code when it is loaded."""
    (folder / "own.py").write_text(OWN.format(top=top, inner="pass"))
    (folder / "models.toml").write_text(ROW.format(reference=reference))
    try:
        read_models(folder / "models.toml", None)
    except SettingsError as error:
        return str(error)
    return ""


async def started(folder: Path, top: str = "", inner: str = "pass", *, network: bool = False) -> StrategyProcess:
    (folder / "own.py").write_text(OWN.format(top=top, inner=inner))
    begin = Begin(f"{folder / 'own.py'}:Own", {}, VARIANTS[VariantId.APEX].limits, None)
    return await start_strategy(begin, network=network)


async def told(folder: Path, inner: str, top: str = "", *, network: bool = False) -> str:
    """Return what a strategy tells of this code in its decision, or why it gave none."""
    process = None
    try:
        process = await started(folder, top, inner, network=network)
        return (await process.decide(VIEW)).reason or ""
    except ProviderError as error:
        return str(error)
    finally:
        if process is not None:
            await process.end()


@pytest.fixture(params=CONFINED, ids=lambda confined: "confined" if confined else "unconfined")
def confined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether strategies are confined."""
    if not request.param:
        monkeypatch.setattr(strategy_process, "can_confine", lambda: False)
    return bool(request.param)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Return the processes that strategies of this test have left, wherever they went."""
    mark = f"STRATEGY_MARK={uuid4()}"
    monkeypatch.setenv(*mark.split("="))

    def marked() -> Iterator[int]:
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdecimal() and mark.encode() in (folder / "environ").read_bytes():
                    yield int(folder.name)
            except OSError:
                continue

    return lambda: list(marked())


@pytest.mark.usefixtures("confined")
def test_a_file_is_loaded_in_its_own_process_without_secrets(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", SECRET)
    assert problems_of(open_folder) == ""
    told = "raise RuntimeError([os.environ.get('OPENROUTER_API_KEY'), 'trader.agents.models_file' in sys.modules])"
    assert "raised RuntimeError: [None, False]" in problems_of(open_folder, told)


@pytest.mark.parametrize("reference", ["../own.py:Own", "/etc/own.py:Own", "link.py:Own", "inner/own.py:Own"])
def test_a_file_outside_of_the_folder_is_not_run(open_folder: Path, reference: str) -> None:
    folder, marker = open_folder / "models", open_folder / "ran"
    folder.mkdir()
    (open_folder / "own.py").write_text(OWN.format(top=f"open({str(marker)!r}, 'w')", inner="pass"))
    (folder / "link.py").symlink_to(open_folder / "own.py")
    (folder / "inner").symlink_to(open_folder)
    assert "is outside of it" in problems_of(folder, reference=reference)
    assert not marker.exists()


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_file_that_never_loads_is_ended(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_process, "START_LIMIT_S", 2.0)
    never = "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(3600)"
    assert "did not answer within 2 s" in problems_of(open_folder, never)
    os.mkfifo(open_folder / "fifo.py")
    assert "Not a regular file" in problems_of(open_folder, reference="fifo.py:Own")


# --- what it answers and prints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ("answer('{\"state\":' + '[' * 100000 + ']' * 100000 + '}')", "gave an invalid answer"),
        ("answer('{\"calls\":[' + '{\"id\":\"\",\"name\":\"\",\"arguments\":\"\"},' * 100 + '0]}')", "length <= 100"),
        ("answer('x' * (1 << 23))", "longer than 4194304 bytes"),
        ("answer('\\xff')", "gave an invalid answer"),
        ("answer('{\"reason\":\"no\\\\u0000thing\"}')", "nothing"),
        ("os.write(1, b'printed ' * (1 << 20))", "held"),
        ("sys.stdin.close(); os.close(0)", "held"),
    ],
)  # fmt: skip
async def test_no_answer_or_flood_reaches_further_than_its_cycle(open_folder: Path, inner: str, reason: str) -> None:
    assert reason in await told(open_folder, inner)


@pytest.mark.parametrize(
    "begun",
    [
        '{"deadline_s": 1e9}', '{"deadline_s": -1}', '{"shown": [["1m"], 1000000000, 5, 0]}',
        '{"shown": [["7m"], 10, 5, 0]}', '{"shown": [["1m"], 10, 500000, 0]}',
    ],
)  # fmt: skip
def test_a_file_asks_for_no_more_than_a_strategy_may(open_folder: Path, begun: str) -> None:
    assert "gave an invalid answer" in problems_of(open_folder, f"answer({begun!r})")


def test_what_a_strategy_prints_is_logged_up_to_a_bound(open_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trader.agents")
    assert problems_of(open_folder, "print('first', os.isatty(2)); sys.stderr.write('x' * (1 << 22))") == ""
    printed = "".join(record.getMessage() for record in caplog.records if "printed" in record.getMessage())
    assert "first False" in printed
    assert 1 << 15 < len(printed) < 1 << 17


# --- memory and processes ---------------------------------------------------------------------------------------------


LIMITS = {
    "bytearray(5 << 30)": "MemoryError()",
    "__import__('tempfile').TemporaryFile().write(bytes(65 << 20))": "OSError(27, 'File too large')",
    "resource.getrlimit(resource.RLIMIT_CPU)": "(7200, 7200)",
    "resource.getrlimit(resource.RLIMIT_NPROC)": "(512, 512)",
    "[os.dup(0) for _ in range(200)]": "OSError(24, 'Too many open files')",
    "os.memfd_create('hidden')": "OSError(38, 'Function not implemented')",
    "socket.socket(40, socket.SOCK_STREAM)": "OSError(38, 'Function not implemented')",  # AF_VSOCK
    "call(29, 0, 1 << 30, 0o1600)": "-1",  # shmget
    "call(272, 0x10020000)": "-1",  # unshare a user's and mounts' namespace
    "call(56, 0x10000011, 0, 0, 0, 0)": "-1",  # clone one
    "call(250, 0, -3, 1)": "-1",  # the session's keyring
    "call(101, 0, 0, 0, 0)": "-1",  # ptrace
}


@pytest.mark.usefixtures("confined")
async def test_a_process_has_limits(open_folder: Path) -> None:
    machine = {code: reason for code, reason in LIMITS.items() if "call(" not in code or os.uname().machine == "x86_64"}
    top = f"""
def tried(code):
    try:
        return repr(eval(code))
    except Exception as error:
        return repr(error)
found = [tried(code) for code in {list(machine)!r}]
"""
    assert await told(open_folder, "told = found", top) == str(list(machine.values()))


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize(
    ("top", "reason"),
    [
        ("fork(lambda: (bytearray(b'x') * (200 << 20), time.sleep(60)))\n" * 3, "use more than 512 MiB of memory"),
        ("fork(lambda: time.sleep(60))\n" * 40, "more than 16 processes"),
        ("for _ in range(40):\n fork(lambda: (os.setsid(), fork(lambda: time.sleep(60))))", "more than 16 processes"),
        ("while True: fork(lambda: [fork(lambda: time.sleep(9)) for _ in range(3)])", "more than 16 processes"),
    ],
)  # fmt: skip
def test_all_that_a_strategy_starts_is_bounded_together(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, running: Callable[[], list[int]], top: str, reason: str
) -> None:
    if "memory" in reason:
        monkeypatch.setattr(confinement, "MEMORY_MAX", 512 << 20)
    assert reason in problems_of(open_folder, top + "\ntime.sleep(20)")
    assert running() == []


@needs_bubblewrap
async def test_files_in_memory_are_bounded(open_folder: Path) -> None:
    top = """
def filled(place):
    n, made = 0, []
    try:
        while True:
            made.append(f'{place}/{n}')
            open(made[-1], 'wb').write(bytes(1 << 20))
            n += 1
    except OSError as error:
        for name in made[:n]:
            os.remove(name)
        return error.strerror, n <= 64
found = {place: filled(place) for place in ("/tmp", "/dev/shm", "/dev", "/", "/home", ".")}
"""
    expected = ("Read-only file system", "No space left on device", "No such file or directory")
    found = literal_eval(await told(open_folder, "told = found", top))
    assert {(why in expected, is_bounded) for why, is_bounded in found.values()} == {(True, True)}, found


STARTED = "signal.signal(signal.SIGTERM, signal.SIG_IGN); fork(lambda: (os.setsid(), fork(lambda: time.sleep(3600))))"


async def all_run(running: Callable[[], list[int]]) -> None:
    """Wait until the strategy's orphan runs next to the strategy and its two keepers."""
    async with asyncio.timeout(30):
        while len(running()) < 4:
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize(
    "inner", ["1 / 0", "os._exit(0)", "os.kill(os.getpid(), 9)", "threading.Timer(0.1, os._exit, [0]).start()"]
)
async def test_what_a_failed_strategy_started_ends_with_it(
    open_folder: Path, running: Callable[[], list[int]], inner: str
) -> None:
    process = await started(open_folder, STARTED, inner)
    await all_run(running)
    with suppress(ProviderError):
        await process.decide(VIEW)
    if "/" in inner:
        await process.end()
    async with asyncio.timeout(30):
        while not process.has_ended:
            await asyncio.sleep(0.01)
    assert running() == []
    await process.end()


@pytest.mark.parametrize("how", ["its input ends", "it is killed", "the service is killed"])
@pytest.mark.usefixtures("confined")
async def test_what_a_strategy_starts_ends_with_it(
    open_folder: Path, running: Callable[[], list[int]], how: str
) -> None:
    (open_folder / "own.py").write_text(OWN.format(top=STARTED, inner="pass"))
    reference = f"{open_folder / 'own.py'}:Own"
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", '"$@"; true', "service") * (how == "the service is killed"), *command(reference),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(Begin(reference, {}, VARIANTS[VariantId.APEX].limits, None)) + b"\n")
    assert json.loads(await process.stdout.readline())["error"] is None
    await all_run(running)
    if how == "its input ends":
        process.stdin.close()
    else:
        process.kill()
    async with asyncio.timeout(30):
        if how == "the service is killed":  # its keeper still has an input
            while running():
                await asyncio.sleep(0.01)
        process.stdin.close()
        await process.communicate()  # unlike `wait`, until its output is closed, too
    assert running() == []


# --- files and sockets ------------------------------------------------------------------------------------------------

SEEN = "open('own.py').read()", "open('helper.py').read()", "__import__('package.inner').inner.x"
HIDDEN_FILES = (
    ".env", "lab.env", "lab.env.old", "notes.txt", "models.toml", ".hidden.py", "package/.env", "package/keys.json",
    "folder/keys.py", ".trader/data", "package/folder/.env", "later.py",
)  # fmt: skip
LINKS = {"link.py": ".env", "linked": "package", "package/link.py": "../.env", "outside.py": "/etc/passwd"}
HIDDEN = (
    *(f"open({name!r})" for name in (*HIDDEN_FILES, *LINKS, "linked/__init__.py", "hard.py")),
    "open('/etc/passwd')", "open('/root/.profile')", "os.listdir('/var')", "os.listdir('/run')", "os.listdir('/sys')",
    "os.listdir('/etc/ssl')", "open('/proc/PID/environ')", "open('/proc/1/root/etc/passwd')",
    "open('CHECKOUT/pyproject.toml')", "open('/dev/kmsg')", "open('/dev/tty')", "glob.glob('/dev/[sv]d*')[0]",
    "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)",
    "[each for each in glob.glob('/proc/[0-9]*/environ') if 'SECRET' in open(each).read()][0]",
)  # fmt: skip
"""Places that an unconfined strategy could open: in its folder, on the machine, and in the service's process."""


@needs_bubblewrap
async def test_a_confined_strategy_sees_its_modules_and_nothing_else_also_later(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files outside its view are missing, even those that are created while the strategy runs."""
    monkeypatch.setenv("OPENROUTER_API_KEY", SECRET)
    (open_folder / "package").mkdir()
    for name in ("helper.py", "package/__init__.py", "package/inner.py"):
        (open_folder / name).write_text("x = 'seen'")

    def save() -> None:
        for name in HIDDEN_FILES:
            (open_folder / name).parent.mkdir(exist_ok=True)
            (open_folder / name).unlink(missing_ok=True)
            (open_folder / name).write_text(SECRET)
        for name, target in LINKS.items():
            (open_folder / name).unlink(missing_ok=True)
            (open_folder / name).symlink_to(target)
        (open_folder / "hard.py").unlink(missing_ok=True)
        (open_folder / "hard.py").hardlink_to(open_folder / ".env")

    save()
    (open_folder / "later.py").unlink()
    hidden = tuple(
        each.replace("PID", str(os.getpid()), 1).replace("CHECKOUT", str(ROOT)).replace("SECRET", SECRET)
        for each in HIDDEN
    )
    top = f"""
def tried():
    for expression in {SEEN!r} + {hidden!r}:
        try:
            value = eval(expression)
            yield expression, value.read() if hasattr(value, "read") else value
        except (OSError, IndexError, ImportError):
            pass
"""
    process = await started(open_folder, top, "told = [name for name, _ in tried()]")
    try:
        assert (await process.decide(VIEW)).reason == str(list(SEEN))
        save()
        for name in ("own.py", "helper.py"):
            (open_folder / name).rename(open_folder / "renamed.py")
            (open_folder / name).symlink_to(".env")
        assert (await process.decide(VIEW)).reason == str(list(SEEN))
    finally:
        await process.end()


@needs_bubblewrap
@pytest.mark.parametrize("network", [False, True])
async def test_a_confined_strategy_reaches_no_server_unless_its_row_says_so(
    open_folder: Path, tmp_path: Path, *, network: bool
) -> None:
    servers: list[Any] = [("127.0.0.1", 0), "\0" + str(uuid4()), str(tmp_path / "server")]
    reached = []
    for address in servers:
        with socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX) as server:
            server.bind(address)
            server.listen()
            name = server.getsockname()
            name = name.decode() if isinstance(name, bytes) else name
            connect = f"socket.socket(socket.{server.family.name}).connect({name!r})"
            reached.append(await told(open_folder, connect, network=network))
    assert [each == "held" for each in reached] == [network, network, False]


def test_the_unit_allows_the_namespaces_of_the_confinement() -> None:
    """As systemd 252 does with these lines; without @mount or one of the namespaces bubblewrap ends with an error."""
    unshared = {word.removeprefix("--unshare-") for word in confinement.NAMESPACES}
    unit = ConfigParser(interpolation=None)
    unit.read(ROOT / "scripts" / "packaging" / "trader.service")
    assert set(unit["Service"]["RestrictNamespaces"].split()) == {"user", "mnt", *unshared}
    assert "@mount" in unit["Service"]["SystemCallFilter"].split()
    assert "AF_NETLINK" in unit["Service"]["RestrictAddressFamilies"].split()  # starts the loopback of a network
