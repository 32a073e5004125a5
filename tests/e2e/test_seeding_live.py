"""Every seeding command of docs/models.md next to a running service, which trades the new models."""

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.process import ROOT, ServiceProcess, passed_on, run_command, serving
from support.trading_provider import call, opening, trading_provider
from support.waiting import until

from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.leadership import LeaderLock

pytestmark = pytest.mark.processes

SEEDING = re.compile(r"scripts/seed_accounts\.py|trader models (seed|add)")
FILE = re.compile(r"printf [^>]*> models\.toml", re.DOTALL)
VARIANTS = ("apex", "trendsurfer", "contrarian", "sovereign")
AI_MODEL = "deepseek-chat-apex"
SEEDED = {"my-apex", AI_MODEL, *(f"{variant}-rules{number}" for variant in VARIANTS for number in ("", "-2"))}
TRADED_WITHIN_S = 150
"""A minute until the service takes the models up, the cycle, and a machine that is busy."""


def seeding_commands() -> list[str]:
    """Return the commands of the document that seed models or write the file for it, in order."""
    return [text for text in commands() if SEEDING.match(text) or FILE.match(text)]


def commands() -> Iterator[str]:
    """Yield the lines of the document's indented blocks; lines within one quotation are one command."""
    text = ""
    for line in (ROOT / "docs" / "models.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("    "):
            text = ""
            continue
        text += line.removeprefix("    ")
        with suppress(ValueError):  # an open quotation
            shlex.split(text, comments=True)
            yield text
            text = ""
            continue
        text += "\n"


async def shell(folder: Path, text: str, environ: dict[str, str]) -> str:
    """Run a command from a checkout, as a reader would, and return its output and errors."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", text, cwd=folder, env={**passed_on(), "PATH": path, "HOME": str(folder), **environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert process.returncode == 0, (text, output.decode())
    return output.decode()


def test_the_document_shows_how_models_are_added() -> None:
    texts = "\n".join(seeding_commands())
    assert texts.count("scripts/seed_accounts.py") >= 4
    for shown in ("--history", "--demo --models", "printf '[[models]]", "models.toml  ", "--variant"):
        assert shown in texts


@pytest.mark.parametrize("kind", ["embedded", "DATABASE_URL"])
async def test_models_seeded_by_the_document_trade_on_the_running_service(
    kind: str, open_folder: Path, empty_dsn: str
) -> None:
    environ = {"DATABASE_URL": empty_dsn} if kind == "DATABASE_URL" else {}
    (open_folder / "scripts").symlink_to(ROOT / "scripts")
    with trading_provider() as provider:
        provider.always = [call(1, "createPosition", **opening("BTC", 0.01))]
        keys = {"OPENROUTER_API_KEY": "sk-or-of-the-test-000000", "OPENROUTER_BASE_URL": provider.url}
        async with serving(open_folder, MARKET_SOURCE="synthetic", **keys, **environ) as service:
            texts = seeding_commands()
            if kind == "DATABASE_URL":  # the rest do the same as on an embedded database
                texts = [*texts[-2:], texts[-1]]
            for text in texts:
                printed = await shell(open_folder, text, environ)
                if SEEDING.match(text):
                    assert re.search("^database: .*, the service is running$", printed, re.MULTILINE), printed
                    assert ("embedded in" in printed) == (kind == "embedded")
            ids = {model["id"] for model in (await service.call("models.getModels"))["models"]}
            if kind == "DATABASE_URL":
                assert "0 of 1 model added, 0 accounts opened." in printed, "the second time"
                assert "my-apex" in ids
                return
            assert ids >= SEEDED
            await all_decide(service)
            positions = await service.call("trading.getPositions", modelId="deepseek-chat-apex")
            assert [position["symbol"] for position in positions] == ["BTC"], await latest(
                service, "deepseek-chat-apex"
            )
            assert service.traceback() == ""


async def all_decide(service: ServiceProcess) -> None:
    """Wait until every model that was seeded has completed an invocation."""
    decided = set[str]()

    async def have_decided() -> bool:
        for name in SEEDED - decided:
            if any(run["status"] == "completed" for run in await latest(service, name)):
                decided.add(name)
        return decided == SEEDED

    await until(have_decided, within_s=TRADED_WITHIN_S)


async def latest(service: ServiceProcess, model_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await service.call("models.getInvocations", modelId=model_id))["conversations"]
    return found


async def test_seeding_before_the_first_start_makes_the_database_of_that_service(open_folder: Path) -> None:
    (open_folder / "models.toml").write_text('[[models]]\nid = "a"\nvariant = "Apex"\nprovider = "rules"\n')
    code, seeded = await run_command(open_folder, "models", "add", "--demo", "models.toml")
    assert (code, seeded["added"], seeded["database"]["service"]) == (0, 1, "not running")
    assert "trader_synthetic" in seeded["database"]["place"]
    async with serving(open_folder) as service:
        assert [model["id"] for model in (await service.call("models.getModels"))["models"]] == ["a"]


async def test_seeding_uses_the_database_of_the_only_running_service_in_any_market(open_folder: Path) -> None:
    seed = ("models", "add", "--models", "1")

    async def seeded(*arguments: str) -> tuple[str, str]:
        code, value = await run_command(open_folder, *seed, *arguments)
        assert code == 0, value
        return value["database"]["place"].rpartition(" ")[2], value["database"]["service"]

    assert await seeded("--demo") == ("(trader_synthetic)", "not running")
    (open_folder / ".env").write_text("MARKET_SOURCE=synthetic\nSIM_SEED=7\n")
    assert await seeded() == ("(trader_synthetic_7)", "not running")
    (open_folder / ".env").unlink()
    async with EmbeddedPostgres(open_folder / EMBEDDED_FOLDER) as server:
        first, second = (LeaderLock(server.dsn(name)) for name in ("trader_synthetic_7", "trader_synthetic"))
        assert await first.try_acquire()
        for arguments in ((), ("--demo",)):
            assert await seeded(*arguments) == ("(trader_synthetic_7)", "running")
        assert await second.try_acquire()
        code, refused = await run_command(open_folder, *seed)
        assert (code, refused["error"]["message"]) == (
            1, "Choose one with --database: trader_synthetic, trader_synthetic_7."
        )  # fmt: skip
        assert await seeded("--database", "trader_synthetic") == ("(trader_synthetic)", "running")
        await first.release()
        await second.release()
