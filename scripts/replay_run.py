#!/usr/bin/env python3
"""Execute the recorded calls of an invocation again and report whether the books come out the same.

  scripts/replay_run.py 0f4c1f2e-8d0e-5b2a-9c55-3f0f6a1f9f10 [--database-url URL]

Every call is decoded again from the model's raw arguments, judged again by the guard on the account and marks of that
moment, and executed again by the rules of the exchange on the recorded order books; the result is compared with the
recorded one and with the rows of the books, digit for digit. Nothing is written. A call that a venue executed in live
trading cannot be executed again: only the guard's verdict is compared, and the result stays unknown.

Without --database-url: DATABASE_URL (from the environment or .env), or the embedded PostgreSQL of this folder, also
while a service uses it. Exit code 0: the same; 1: not the same, or not all of it is recorded; 2: there is no such
invocation, or the database cannot be read.
"""

import argparse
import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("trader") is None:  # called by a Python without the service: take that of its environment
    subprocess.run([ROOT / "scripts" / "make_environment", "run"], check=True)  # noqa: S603 - our own script
    python = ROOT / ".venv" / "bin" / "python"
    os.execv(python, [str(python), __file__, *sys.argv[1:]])  # noqa: S606 - as above

# ruff: noqa: E402 - nothing of the service can be imported before its environment is there
from trader.dotenv import add_env_file_option
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import NotFound, StartError, TraderError
from trader.services.agents.reproduction import InvocationReproduction, reproduce_invocation
from trader.settings import read_database_url
from trader.store.database.schema import open_database

WORDS = {True: "same", False: "DIFFERENT", None: "unknown"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("invocation", type=UUID, help="the id of the invocation, as getInvocations returns it")
    parser.add_argument("--database-url", help="default: DATABASE_URL, from the environment or .env")
    add_env_file_option(parser)
    options = parser.parse_args(arguments)
    try:
        database_url = options.database_url or read_database_url(os.environ, options.env_file)
        return _report(asyncio.run(_reproduce(database_url, options.invocation)))
    except TraderError as error:
        print(f"replay_run: {error}", file=sys.stderr)
        return 2


async def _reproduce(database_url: str | None, invocation_id: UUID) -> InvocationReproduction:
    if database_url:
        return await _reproduce_in(database_url, invocation_id)
    async with EmbeddedPostgres(EMBEDDED_FOLDER).attach() as server:
        for name in await server.databases():
            try:
                return await _reproduce_in(server.dsn(name), invocation_id)
            except (NotFound, StartError):
                continue  # the database of another market, or one of an earlier version
    raise NotFound(f"no database of this folder has the invocation {invocation_id}")


async def _reproduce_in(dsn: str, invocation_id: UUID) -> InvocationReproduction:
    async with open_database(dsn) as database:
        return await reproduce_invocation(database, invocation_id)


def _report(reproduction: InvocationReproduction) -> int:
    invocation = reproduction.invocation
    started_at = f"{invocation.started_at:%Y-%m-%d %H:%M:%S} UTC"
    print(f"{invocation.model_id}, {started_at}, {invocation.status}, {len(reproduction.calls)} calls")
    for call, found in reproduction.calls:
        name = call.type if call.metadata["raw"] is None else call.metadata["raw"]["name"]
        print(f"  {call.number}. {name} ({call.status}): {WORDS[found.same]}: {found.detail}")
    if reproduction.is_same:
        print("The books come out the same.")
    elif any(found.same is False for _, found in reproduction.calls):
        print("The books do NOT come out the same.")
    else:
        print("Not all inputs of the invocation are recorded; the rest comes out the same.")
    return 0 if reproduction.is_same else 1


if __name__ == "__main__":
    sys.exit(main())
