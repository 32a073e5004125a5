"""Forged results of a season that its two verifiers accept: none of ten thousand changes.

    scripts/benchmark forgeries [--changes 10000] [--second 1000] [--seed 1]

A season is closed as the service does it. Then a row, a cell, a file, a link or a digit of its folder is changed,
removed, added or swapped, and `trader season check` and docs/examples/verify_card.py judge the folder, the second one
for the first `--second` changes.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures, temporary_folder
from support.published import add_rows, fuzz, open_season, record_rows, write_anchors

from trader.commands.audit import read_anchors
from trader.core.errors import SettingsError
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.record.domain.chain import Anchor
from trader.seasons.check import compare_files, derive_result

ROOT = Path(__file__).resolve().parents[2]


async def publish(folder: Path) -> None:
    """Close a season of a database of its own, and write its result and the anchors."""
    async with EmbeddedPostgres(folder / "postgres") as server:
        dsn = await server.ensure_database("trader_benchmark")
        database = await Database.connect(dsn)
        try:
            await apply_schema(database)
            await open_season(database)
            await add_rows(database)
            await record_rows(database)
            command = [sys.executable, "-P", "-m", "trader", "season", "close", "result", "--database-url", dsn]
            closing = await asyncio.create_subprocess_exec(*command, cwd=folder, env={**os.environ})
            if await closing.wait():
                raise SystemExit("the season cannot be closed")
            await write_anchors(database, folder / "anchors")
        finally:
            await database.close()


def second_verifier() -> Any:
    spec = importlib.util.spec_from_file_location("verify_card", ROOT / "docs" / "examples" / "verify_card.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def judge(folder: Path, anchors: list[Anchor], changes: int, second: int, seed: int) -> int:
    figures, rng = Figures(), random.Random(seed)
    original, forged, verify = folder / "result", folder / "forged", second_verifier().verify
    contents = {file.name: file.read_bytes() for file in original.iterdir()}
    known = {anchor.position: anchor.digest.hex() for anchor in anchors}
    derived = await derive_result(original, "csv", anchors)
    assert not derived.differences
    assert not compare_files(original, "csv", derived)
    assert not verify(original, known)
    shutil.copytree(original, forged)
    accepted: dict[str, list[str]] = {"the check": [], "the second verifier": []}
    made, began_s = 0, time.perf_counter()
    while made < changes:
        what = fuzz(forged, original, rng)
        name = what.split()[2]
        if (forged / name).read_bytes() != contents[name]:
            made += 1
            try:
                is_record = name == "record.jsonl"
                found = (await derive_result(forged, "csv", anchors)).differences if is_record else ()
                if not (found if is_record else compare_files(forged, "csv", derived)):
                    accepted["the check"].append(what)
            except SettingsError:
                pass
            if made <= second:
                with redirect_stdout(None):  # a line for each
                    found = verify(forged, known)
                if not found:
                    accepted["the second verifier"].append(what)
        (forged / name).write_bytes(contents[name])
    for verifier, changed in accepted.items():
        print(json.dumps({verifier: changed[:10]}) if changed else f"{verifier}: none accepted")
        figures.show(f"changes accepted by {verifier}", len(changed), "", at_most=0)
    figures.show("changes", made, "")
    figures.show("time", time.perf_counter() - began_s, "s")
    return figures.exit_code


async def measure(folder: Path, options: argparse.Namespace) -> int:
    await publish(folder)
    return await judge(folder, read_anchors(folder / "anchors"), options.changes, options.second, options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--second", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with temporary_folder() as folder:
        return asyncio.run(measure(folder, options))


if __name__ == "__main__":
    sys.exit(main())
