"""Plant plausible bugs, one at a time, in a copy of the program, and see which test finds each."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from tools.mutant_list import MUTANTS, Mutant

ROOT: Final = Path(__file__).parents[2]
COPIED: Final = ("trader", "tests", "schema.sql", "pyproject.toml", "docs", "scripts")
LIMIT_S: Final = 600.0


class Outcome(NamedTuple):
    """The result of running the tests on a planted bug: the first failure, no failure, or a timeout.

    A timeout does not count as found: a hang is indistinguishable from a slow machine, so a test must fail on its own.
    """

    test: str | None
    seconds: float
    has_ended: bool = True

    def __str__(self) -> str:
        return self.test or ("**nothing**" if self.has_ended else f"**no end within {LIMIT_S:g} s**")


def planted(mutant: Mutant, source: str) -> str:
    """Return the text of a file with the bug.

    :raises ValueError: a text to replace does not stand in it exactly once: the program has changed
    """
    for old, new in mutant.changes:
        if source.count(old) != 1:
            raise ValueError(f"{mutant.name}: {mutant.path} has this text {source.count(old)} times: {old!r}")
        source = source.replace(old, new)
    return source


def run(mutant: Mutant, folder: Path) -> Outcome:
    """Run the tests of a bug in a copy of the program."""
    file = folder / "trader" / mutant.path
    source = file.read_text(encoding="utf-8")
    file.write_text(planted(mutant, source), encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'tests'}", "HYPOTHESIS_PROFILE": "nightly"}
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:schemathesis", "-p", "no:cacheprovider", "-x", "-q"]
    began_s = time.monotonic()
    try:
        tests = [str(folder / "tests" / test) for test in mutant.tests]
        ended = subprocess.run(
            [*command, *tests], cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if ended.returncode not in (0, 1):
            raise RuntimeError(f"{mutant.name}: the tests could not run:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    except subprocess.TimeoutExpired:
        return Outcome(None, time.monotonic() - began_s, has_ended=False)
    finally:
        file.write_text(source, encoding="utf-8")
    return Outcome(failed_test(ended.stdout) if ended.returncode == 1 else None, time.monotonic() - began_s)


def failed_test(output: str) -> str:
    """Return the name of the first failed test in pytest's output."""
    summary = output.rpartition("short test summary info")[2]
    failed = re.search(r"^(?:FAILED|ERROR) ([^\n]+?)(?: - |$)", summary, re.MULTILINE)
    return failed[1].rpartition("::")[2] if failed else "a test"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only bugs whose name contains one of these words")
    words = parser.parse_args().words
    chosen = [each for each in MUTANTS if not words or any(word in each.name for word in words)]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="trader-mutants-") as name:
        folder = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        print("| planted | found by | seconds |\n|---|---|---|")
        for mutant in chosen:
            outcomes.append(outcome := run(mutant, folder))
            print(f"| {mutant.name} | {outcome} | {outcome.seconds:.0f} |", flush=True)
    found, endless = sum(each.test is not None for each in outcomes), sum(not each.has_ended for each in outcomes)
    print(f"{found} of {len(chosen)} found, {endless} without an end.")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
