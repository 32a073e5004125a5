"""Every command of the documents, in order, in a fresh folder for each document but some that share one."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest
from support.documents import DOCUMENTS, Command, Reader, commands_of, fenced_blocks, indented_blocks
from support.fake_venue import fake_venue
from support.trading_provider import trading_provider

T = TypeVar("T")

pytestmark = pytest.mark.processes

DOCUMENTS_WITH_COMMANDS = [document for document in DOCUMENTS if commands_of(document)]

TOGETHER = ("docs/commands.md", "docs/record.md", "docs/api.md", "docs/scaling.md")
"""Documents that need nothing but a new demo, and change little of it: one after the other, they share one."""

FOLLOWED = [(document,) for document in DOCUMENTS_WITH_COMMANDS if document not in TOGETHER] + [TOGETHER]

LIMIT_S = 240
"""The longest time for the commands of a document: one that takes minutes is an exception."""

SYSTEMD = "no unit of systemd is installed here"
ROOT_ONLY = "installs into /opt as root"
OTHER_SERVER = "speaks to another machine"
OWN_SERVER = "needs a PostgreSQL of one's own with an archive; walked by hand with version 15"
INSTALLED = "the tutorial installs a service; these commands would set another database for the rest of the page"
PODMAN = "tests/scripts/test_container.py builds the image and runs it"
BACKTEST = "trader lab backtest --data candles"
MODELS = f"{BACKTEST} --models models.toml --from 2025-01-08T00:00:00Z --to"
DIP = f"{BACKTEST} --strategy dip.py:Dip --param"
MAKE = "trader lab candles make candles"
THREE_DAYS = {MAKE: f"{MAKE} --days 3"}
HOURS = "--from 2025-01-02T12:00:00Z --to 2025-01-02T14:00:00Z"
TWO_HOURS = f"{BACKTEST} --models models.toml {HOURS}"
"""Soon after the beginning of a week of the market model, whose paths a replay draws up to where it starts."""

EXCEPTIONS: dict[str, dict[str, str]] = {
    "docs/agents.md": {"claude mcp add": "Claude Code is not installed here"},
    "docs/commands.md": {"trader halt": "needs a replica, as in tests/commands/test_replica.py"},
    "docs/exchange.md": {
        "trader lab candles download": "downloads from Binance; its tests have a server of their own",
        "psql": "names a season that is over",
        "printf %s": "names the seed of that season",
    },
    "docs/frontends.md": {"npm install": "tests/support/orpc.py installs the packages from a lock file"},
    "docs/live.md": {
        ".venv/bin/pip install": "installs the venue's SDK into the environment of the tests",
        "trader rehearse": "trades at a venue; tests/live has one",
        "trader venue-close": "trades at a venue; tests/live has one",
    },
    "docs/models.md": {
        "trader models try": "shows what an agent makes of the market of the moment",
        "trader lab reproduce": "names an invocation of another run; tests/agents/test_reproduction.py has its own",
        "scripts/seed_accounts.py": "tests/e2e/test_seeding_live.py runs them beside a service that trades the models",
    },
    "docs/operation.md": {
        "journalctl": SYSTEMD,
        "printf '%s": INSTALLED,
        "trader check": INSTALLED,
        "trader models add": INSTALLED,
        "trader      ": INSTALLED,
        "PYTHON=/usr/bin/python3 /opt": ROOT_ONLY,
        "cp /opt": ROOT_ONLY,
        "cp -a /backups/base": OWN_SERVER,
        "systemctl": SYSTEMD,
        "podman": PODMAN,
        "git -C /opt": ROOT_ONLY,
        "trader audit chain --anchors": OWN_SERVER,
        "trader status --since": "shows an alarm, which needs a fault; tests/e2e/test_alarms_live.py has some",
        "cd /var/lib/trader": SYSTEMD,
        "systemd-run": SYSTEMD,
        "createuser": "the test has its own database",
        "createdb --owner trader trader": "the test has its own database",
        "createdb --owner trader rehearsal": "restores a second backup into the database of the first",
        "createdb -h": OTHER_SERVER,
        "trader restore moving.dump": OTHER_SERVER,
        "psql": OTHER_SERVER,
        "pg_ctl": OWN_SERVER,
        "ROLE=reader": "needs a replica, as in tests/e2e/test_readers.py",
        "curl -s http://replica": OTHER_SERVER,
        "curl -sI": OTHER_SERVER,
        "timedatectl": SYSTEMD,
        "df -h": "names folders of an installation",
    },
    "docs/record.md": {
        "python docs/examples/verify_card.py": "needs a closed season; tests/seasons/test_season_card.py verifies some",
        "trader audit chain --anchors": "the first anchor is sent after an hour",
    },
    "docs/strategies.md": {
        "pip install": "installs into the environment of the tests",
        "dask": OTHER_SERVER,
        f"{DIP} percent=1..2:0.5": "nine backtests take too long here; tests/commands/test_sweeps.py has shorter ones",
        "trader lab compare": "compares these nine",
    },
}
"""By document, the beginning of a command that does not run here, and the reason."""

AGENT = "mkdir -p agent/bin; printf '#!/bin/sh\\nexec python \"$@\"' > agent/bin/python; chmod +x agent/bin/python"
INSTEAD: dict[str, dict[str, str]] = {
    "docs/agents.md": {"python3 -m venv agent": AGENT},
    "docs/exam.md": {
        "trader lab exam run": "trader lab exam run --models docs/examples/exam.toml --states 6 --out exam"
    },
    "docs/exchange.md": THREE_DAYS,
    "docs/frontends.md": {"npm create": "mkdir -p arena/src"},
    "docs/strategies.md": {
        **THREE_DAYS,
        f"{DIP} percent=1.5": f"{DIP} percent=1.5 {HOURS} --out dip",
        f"{BACKTEST} --variant": f"{BACKTEST} --variant Apex --variant Contrarian {HOURS} --out run",
        f"{MODELS} 2025-01-10T00:00:00Z --out": f"{TWO_HOURS} --out models",
        f"{MODELS} 2025-01-10T00:00:00Z \\": (
            f"{TWO_HOURS} --budget-usd 5 --mask symbols,dates,scale --no-database --out masked"
        ),
    },
}
"""By document, the beginning of a command, and a shorter one, for a shorter period or without its downloads."""

CODES: dict[str, dict[str, int]] = {
    "docs/scaling.md": {"scripts/benchmark": 2},
    "docs/strategies.md": {"trader lab backtest --data candles --models": 2},
}
"""By document, the beginning of a command that shows no output, and its exit code if it is not 0."""

UNTIL: dict[str, dict[str, str]] = {
    "docs/exchange.md": {"RECORD=": "until [ $(zcat recording/*.gz 2>/dev/null | wc -l) -gt 15 ]; do sleep 0.2; done"},
}
"""By document, the beginning of a command that starts a service, and the command until which it runs."""

EXACT = ("trader lab season-plan",)
"""The beginnings of commands whose output has the same figures in every run."""

WITHOUT_THE_DEMO = {f"docs/{name}.md" for name in ("exam", "exchange", "live", "statistics", "strategies", "tutorial")}
"""Documents that begin without a service."""


def exception_to(table: Mapping[str, Mapping[str, T]], document: str, text: str) -> T | None:
    return next((found for start, found in table.get(document, {}).items() if text.startswith(start)), None)


@pytest.mark.parametrize("documents", FOLLOWED, ids=" ".join)
async def test_the_commands_of_a_document_give_the_output_it_shows(
    documents: tuple[str, ...], open_folder: Path, dsn: str, empty_dsn: str
) -> None:
    first, *others = documents
    places = {
        "postgresql://trader:…@localhost/trader": f"'{dsn}'",
        "postgresql://trader:…@127.0.0.1/trader": dsn,
        "postgresql://trader@db.example/trader": f"'{empty_dsn}'",
        "postgresql://trader@127.0.0.1/rehearsal": f"'{empty_dsn}'",
        '"$DATABASE_URL"': f'"{dsn}"',
        "/backups/": f"{open_folder}/backups/",
    }
    prepare(first, open_folder)
    with trading_provider() as provider:
        async with fake_venue() as venue:
            settings = {"OPENROUTER_BASE_URL": provider.url, "VENUE_URL": venue.url}
            async with Reader.begin(open_folder, places, **settings) as reader:
                problems = await problems_of(first, to_follow(first), reader)
                for other in others:
                    problems += await problems_of(other, commands_of(other), reader)
    assert not problems, "\n\n".join(problems)


async def problems_of(document: str, commands: list[Command], reader: Reader) -> list[str]:
    """Follow the commands of a document for at most `LIMIT_S`; return how their effects differ from it."""
    problems = []
    text = ""
    try:
        async with asyncio.timeout(LIMIT_S):
            for command in commands:
                text = command.text
                if exception_to(EXCEPTIONS, document, text):
                    continue
                try:
                    await reader.follow(
                        command,
                        shorter(command),
                        exactly=text.startswith(EXACT),
                        code=exception_to(CODES, document, text) or 0,
                        until=exception_to(UNTIL, document, text) or "",
                    )
                except AssertionError as problem:
                    problems.append(str(problem))
    except TimeoutError:
        problems.append(f"{document} takes longer than {LIMIT_S} s, and ended in: {text}")
    return problems


def shorter(command: Command) -> str:
    """Return a shorter command with the same effect, or nothing: only the README's demo gets its three days."""
    if command.serves and command.document != "README.md":
        return re.sub(r"--demo$", "--demo=fresh", command.text)
    return exception_to(INSTEAD, command.document, command.text) or ""


def to_follow(document: str) -> list[Command]:
    """Return the commands of a document, preceded by the start of the demo that it assumes."""
    commands = commands_of(document)
    if commands[0].serves or document in WITHOUT_THE_DEMO:
        return commands
    demo = Command(document, 0, "scripts/run --demo=fresh", "")
    orders = [command for command in commands_of("README.md") if "placeOrder" in command.text][:2]
    return [demo, *(orders if document == "docs/operation.md" else ()), *commands]


def prepare(document: str, folder: Path) -> None:
    """Create the files that a document assumes."""
    (folder / "backups").mkdir()
    models = '# The models.\n[[models]]\nid = "apex-own"\nname = "Apex"\nvariant = "Apex"\nprovider = "rules"\n'
    if document == "docs/models.md":  # which shows an error in it
        models = models.replace('variant = "Apex"', 'variant = "apex"')
    if document != "README.md":
        (folder / "models.toml").write_text(models)
    if document == "docs/strategies.md":
        (folder / "dip.py").write_text(fenced_blocks(document, "python")[0])


@pytest.mark.parametrize("table", [EXCEPTIONS, INSTEAD, CODES, UNTIL])
def test_every_exception_belongs_to_a_command(table: Mapping[str, Mapping[str, object]]) -> None:
    for document, starts in table.items():
        texts = [command.text for command in commands_of(document)]
        assert [start for start in starts if not any(text.startswith(start) for text in texts)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_command_is_overlooked(document: str) -> None:
    """A block that is not parsed as commands has no line that begins with a command of trader."""
    found = {command.line for command in commands_of(document)}
    for first, block in indented_blocks(document):
        if not found & set(range(first, first + len(block))):
            assert [line for line in block if re.match(r"\$ |(?:scripts/|trader\b|curl )", line)] == []
