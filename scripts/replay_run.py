#!/usr/bin/env python3
"""Execute the recorded calls of a run again, on the market it met, and say whether the books come out the same.

  scripts/replay_run.py 0f4c1f2e-8d0e-5b2a-9c55-3f0f6a1f9f10 [--database-url URL]

Every call is read again from the model's raw words, judged again by the guard on the account and marks of that
moment, and met again with the recorded books by the rules of the exchange; what comes out is compared with the
recorded results and with the rows of the books, digit for digit. Nothing is written. What a venue executed in live
trading cannot be executed again: of such a call only the guard's verdict is compared, and it stays unknown.

Without --database-url: DATABASE_URL (of the environment or of .env), or the embedded PostgreSQL of this folder (of a
service at work too). Exit code 0: the same; 1: not the same, or not all of it is recorded; 2: there is no such run, or
the database cannot be read.
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
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import NotFound, StartError, TraderError
from trader.services.agents.reproduction import InvocationReproduction, reproduce_invocation
from trader.settings import read_database_url
from trader.store.database.pool import attached

WORDS = {True: "same", False: "DIFFERENT", None: "unknown"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("invocation", type=UUID, help="the id of the run, as getInvocations shows it")
    parser.add_argument("--database-url", help="default: DATABASE_URL, of the environment or of .env")
    options = parser.parse_args(arguments)
    try:
        database_url = options.database_url or read_database_url(os.environ, Path(".env"))
        return _tell(asyncio.run(_find(database_url, options.invocation)))
    except TraderError as error:
        print(f"replay_run: {error}", file=sys.stderr)
        return 2


async def _find(database_url: str | None, invocation_id: UUID) -> InvocationReproduction:
    if database_url:
        return await _execute_again(database_url, invocation_id)
    async with EmbeddedPostgres.attached(EMBEDDED_FOLDER) as server:
        for name in await server.databases():
            try:
                return await _execute_again(server.dsn(name), invocation_id)
            except (NotFound, StartError):
                continue  # a run of another market's database, or one that an earlier version has left
    raise NotFound(f"no database of this folder has the run {invocation_id}")


async def _execute_again(dsn: str, invocation_id: UUID) -> InvocationReproduction:
    async with attached(dsn) as database:
        return await reproduce_invocation(database, invocation_id)


def _tell(rerun: InvocationReproduction) -> int:
    run = rerun.invocation
    print(f"{run.model_id}, {run.started_at:%Y-%m-%d %H:%M:%S} UTC, {run.status}, {len(rerun.calls)} calls")
    for call in rerun.calls:
        print(f"  {call.number}. {call.name} ({call.status}): {WORDS[call.same]}: {call.told}")
    if rerun.is_same:
        print("The books come out the same.")
    elif any(call.same is False for call in rerun.calls):
        print("The books do NOT come out the same.")
    else:
        print("Not everything that the run met is recorded; the rest comes out the same.")
    return 0 if rerun.is_same else 1


if __name__ == "__main__":
    sys.exit(main())
