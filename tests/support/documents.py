"""The commands in the documents, and a reader who runs them in order, like a person at a shell."""

import asyncio
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Final, Self

import msgspec
from support.waiting import until

from trader.database.pool import place

ROOT: Final = Path(__file__).parents[2]
DOCUMENTS: Final = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))

PROGRAMS: Final = frozenset({
    ".venv/bin/pip", "/opt/trader/bin/pip", "agent/bin/python", "cd", "claude", "cp", "createdb", "createuser", "curl",
    "dask", "df", "export", "git", "journalctl", "npm", "pip", "podman", "printf", "psql", "python", "python3",
    "scripts", "systemctl", "systemd-run", "timedatectl", "trader",
})  # fmt: skip
"""What a line that no prompt marks as a command begins with."""

_ASSIGNMENTS: Final = re.compile(r"^(?:[A-Z_]+=\S* +)*")
_SERVES: Final = re.compile(r"(?:scripts/run|trader)(?: serve)?(?: --demo(?:=fresh)?)?")
_END: Final = "\x1e"
_PORT: Final = "8081"
_LOG_TIMEOUT_S: Final = 90
"""Bounds the wait for a start or an event: the agents, whose events a stream shows, run once a minute."""
_END_TIMEOUT_S: Final = 10


class Command(msgspec.Struct, frozen=True):
    """A command of a document, with its output as shown in the document (empty if none is shown)."""

    document: str
    line: int
    text: str
    output: str
    precedes_start: bool = False
    """Whether a later command of its block starts the service, so that the one before it has ended."""

    @property
    def plain(self) -> str:
        """The command without its comment, its assignments and `cd FOLDER &&`."""
        text = re.sub(r"^cd \S+ && ", "", re.sub(r"\s+# .*", "", self.text))
        return _ASSIGNMENTS.sub("", text)

    @property
    def serves(self) -> bool:
        """Whether the command runs the service, until it is stopped."""
        return _SERVES.fullmatch(self.plain) is not None

    @property
    def streams(self) -> bool:
        """Whether the command prints events until it is stopped."""
        return self.text.startswith("curl -sN ")


def commands_of(document: str) -> list[Command]:
    """Return the commands of a document's indented blocks, in order."""
    commands: list[Command] = []
    for first, block in indented_blocks(document):
        group = list(_commands(document, first, block))
        starts = max((place for place, command in enumerate(group) if command.serves), default=0)
        commands += [
            msgspec.structs.replace(command, precedes_start=place < starts) for place, command in enumerate(group)
        ]
    return commands


def indented_blocks(document: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the unindented lines of each indented block."""
    block: list[str] = []
    first, is_fenced = 0, False
    for number, line in enumerate((ROOT / document).read_text(encoding="utf-8").splitlines(), 1):
        is_fenced ^= line.startswith("```")
        if line.startswith("    ") and not is_fenced:
            first = first if block else number
            block.append(line[4:])
        elif block and not line and block[0].startswith("$ "):
            block.append("")  # within an output; commands without a prompt end here
        elif block:
            yield first, block
            block = []
    if block:
        yield first, block


def fenced_blocks(document: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", (ROOT / document).read_text(encoding="utf-8"))


def _commands(document: str, first: int, block: list[str]) -> Iterator[Command]:
    """Yield the commands of a block: lines without a prompt are output, unless the block has no prompts."""
    has_prompts = block[0].startswith("$ ")
    if not has_prompts and _program(next((line for line in block if not line.startswith("#")), "")) not in PROGRAMS:
        return
    start, text, output = 0, "", list[str]()
    for number, line in enumerate(block, first):
        if text and not _is_whole(text):
            text += "\n" + line
        elif line.startswith("$ ") or (not has_prompts and line and not line.startswith("#")):
            if text:
                yield Command(document, start, text, "\n".join(output).strip())
            start, text, output = number, line.removeprefix("$ "), []
        else:
            output.append(line)
    yield Command(document, start, text, "\n".join(output).strip())


def _program(line: str) -> str:
    program, *_ = _ASSIGNMENTS.sub("", line).split(maxsplit=1) or [""]
    return program.removeprefix("/opt/trader/").partition("/")[0] if "scripts/" in program else program


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # an open quotation
        return False
    return not text.endswith("\\")


_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_TOKENS: Final = re.compile(
    r"(?P<id>\b[0-9a-f]{8}-(?:…|[0-9a-f-]{27})|\b(?:tra|whsec)_…)|(?P<digest>\b[0-9a-f]{64}\b)|(?P<gap>…)"
    r"|(?P<number>[+−-]?\d[\d.,:]*)|(?P<text>\S)"
)
_NUMBER: Final = r"[+−-]?\d[\d.,:]*"


def shape(command: Command, *, exactly: bool = False) -> tuple[re.Pattern[str], list[str]]:
    """Return the pattern of the output, and the ids in it, which are the groups of the match.

    Whitespace is ignored, and `…` matches any text. Ids, digests and numbers vary between runs, unless the output must
    match `exactly`; 0 and the numbers of a request do not vary.
    """
    given = {"0", *(re.findall(r"\d[\d.]*", command.text) if command.text.startswith("curl") else ())}
    pattern, ids = "", list[str]()
    for token in _TOKENS.finditer(command.output):
        match token.lastgroup:
            case "id":
                ids.append(token[0])
                pattern += rf"({_UUID}|(?:tra|whsec)_[\w+/=-]+)"
            case "digest":
                pattern += r"[0-9a-f]{64}"
            case "gap":
                pattern += r".*?"
            case "number" if not exactly and token[0] not in given:
                pattern += _NUMBER
            case _:
                pattern += re.escape(token[0])
    return re.compile(pattern, re.DOTALL), ids


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


class Reader:
    """A shell in a fresh folder with a clean environment, and the service that it has started there.

    The service listens on a free port, which replaces 8081 in commands and outputs. `scripts` and `docs` are from the
    checkout, and `trader` from its environment. Ids in a document stand for the ids of this run.
    """

    def __init__(self, shell: asyncio.subprocess.Process, folder: Path, port: int, places: Mapping[str, str]) -> None:
        self.folder = folder
        self._shell = shell
        self._port = str(port)
        self._places = places
        self._ids: dict[str, str] = {}
        self._service: tuple[Command, str] | None = None
        """The first service that the document starts: later calls are to it."""
        self._is_serving = False

    @classmethod
    @asynccontextmanager
    async def begin(cls, folder: Path, places: Mapping[str, str], **environ: str) -> AsyncIterator[Self]:
        """Open the shell, with actual `places` instead of those in the documents; finally end it and its service."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        clean = {"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "PORT": str(port), "LOG_FORMAT": "console"}
        clean["TRADER_URL"] = f"http://localhost:{port}"  # of docs/examples
        shell = await asyncio.create_subprocess_exec(
            "bash", cwd=folder, env={**clean, **environ}, limit=1 << 24,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        reader = cls(shell, folder, port, places)
        await reader.run("set -m")  # a background job is a separate process group, which Ctrl+C reaches as a whole
        try:
            yield reader
        finally:
            await reader.end()

    async def follow(
        self, command: Command, instead: str = "", *, exactly: bool = False, code: int = 0, until: str = ""
    ) -> None:
        """Run a command, or another one `instead`, and compare its output or, if none is shown, its exit code.

        A service that is only started runs until the command `until` ends.

        :raises AssertionError: its effect differs from the document
        """
        if command.precedes_start:
            await self.stop()
        elif not command.serves and not self._is_serving and self._service is not None:
            await self._start(*self._service)
        if command.serves:
            said, output = "", await self._start(command, instead, until)
        elif command.streams:
            said, output = "", await self._watch(command)
        else:
            errors = self.folder / "errors.log"
            text = self._here(instead or command.text)
            output, ended_with = await self.run(f"eval {quote(text)} </dev/null 2>{errors}")
            said = errors.read_text(encoding="utf-8")
            if not command.output and ended_with != code:
                raise AssertionError(f"{_where(command)} ends with {ended_with}:\n{said}{output}")
        if command.output:
            self._compare(command, self._there(said), self._there(output), exactly=exactly)

    async def end(self) -> None:
        """End the shell and what it runs."""
        assert self._shell.stdin is not None
        jobs = await asyncio.create_subprocess_exec("pgrep", "-P", f"{self._shell.pid}", stdout=asyncio.subprocess.PIPE)
        for job in (await jobs.communicate())[0].split():
            with suppress(ProcessLookupError):
                os.killpg(int(job), signal.SIGINT)  # to its subshell alone, the service would outlive the test
        self._shell.stdin.write(b"wait\n")
        self._shell.stdin.close()
        async with asyncio.timeout(_END_TIMEOUT_S):
            await self._shell.wait()

    async def stop(self) -> None:
        """Stop the service, as Ctrl+C does."""
        if self._is_serving:
            await self.run("kill -INT -- -$service; wait $service")
            self._is_serving = False

    async def _start(self, command: Command, instead: str, until: str = "") -> str:
        """Start a service in place of the previous one; return its log up to the moment it listens."""
        await self.stop()
        await self._start_job("service", instead or command.text)
        self._is_serving = True
        log = await self._awaited("service.log", re.compile("listening on .*\n|cannot start|are wrong"))
        assert "listening on" in log, f"{_where(command)} does not start:\n{log}"
        if self._service is None:
            self._service = command, instead
        elif self._service[0] != command:
            await self.run(until or ":")
            await self.stop()
        return log

    async def _watch(self, command: Command) -> str:
        """Read a stream until it has sent what the document shows."""
        await self._start_job("stream", command.text)
        pattern, _ = shape(command)
        output = await self._awaited("stream.log", pattern, squeeze=True)
        await self.run("kill -- -$stream; wait $stream")
        return output

    async def _start_job(self, name: str, text: str) -> None:
        """Run text in the background with its output in the file NAME.log and its process in the variable NAME."""
        log = self.folder / f"{name}.log"
        log.write_bytes(b"")  # the job itself may do so only after the log of the previous one has been read
        await self.run(f"eval {quote(self._here(text))} >{log} 2>&1 & {name}=$!")

    async def _awaited(self, file: str, pattern: re.Pattern[str], *, squeeze: bool = False) -> str:
        text = ""

        def is_there() -> bool:
            nonlocal text
            text = self._there((self.folder / file).read_text(encoding="utf-8"))
            return pattern.search(_squeezed(text) if squeeze else text) is not None

        try:
            await until(is_there, within_s=_LOG_TIMEOUT_S)
        except AssertionError:
            raise AssertionError(f"{file} has nothing like {pattern.pattern}:\n{text}") from None
        return text

    async def run(self, text: str) -> tuple[str, int]:
        """Run text in this same shell, so that `cd` and `export` persist, and return its output and exit code."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{text}\nprintf '\\n%s{_END}' $?\n".encode())
        output, _, code = (await self._shell.stdout.readuntil(_END.encode())).decode().rpartition("\n")
        return output, int(code.removesuffix(_END))

    def _here(self, text: str) -> str:
        """Put this run's port, paths and ids into a command."""
        for shown, actual in (*self._places.items(), *self._ids.items()):
            text = text.replace(shown, actual)
        text = text.replace("…", "0000")  # placeholders that the reader fills in
        text = re.sub(r"(?<![\w/.-])(scripts|docs)/", rf"{ROOT}/\1/", text)
        return text.replace(_PORT, self._port)

    def _there(self, text: str) -> str:
        """Put the port and the folder of the documents into an output."""
        text = re.sub(r"\x1b\[[\d;]*m", "", text)
        for shown, actual in self._places.items():
            text = text.replace(place(actual.strip("'")), place(shown)) if "postgresql:" in shown else text
        return text.replace(f":{self._port}", f":{_PORT}").replace(str(self.folder), "/srv/demo")

    def _compare(self, command: Command, said: str, output: str, *, exactly: bool) -> None:
        """Compare standard output or, since a document may show both, all output of the command."""
        pattern, ids = shape(command, exactly=exactly)
        search = pattern.search if command.streams or command.serves else pattern.fullmatch
        match = search(_squeezed(output)) or search(_squeezed(said + output))
        if match is None:
            raise AssertionError(f"{_where(command)} shows\n{command.output}\n\nbut the output is\n{said}{output}")
        self._ids.update(zip(ids, match.groups(), strict=True))


def _where(command: Command) -> str:
    return f"{command.document}, line {command.line}: {command.text}"
