"""A copy of the package, to which a test adds one part, in the file where such parts belong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson

ROOT = Path(__file__).parents[2]


class EditedCopy:
    """A copy of `trader` in a separate folder, run by a separate process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Bytecode included: only edited files are compiled again.
        shutil.copytree(ROOT / "trader", folder / "trader")
        shutil.copy(ROOT / "schema.sql", folder)

    def insert(self, file: str, text: str, *, before: str) -> None:
        """Insert text before the only occurrence of another text in a file of the package."""
        path = self.folder / "trader" / file
        whole = path.read_text(encoding="utf-8")
        assert whole.count(before) == 1, f"{file} has {before!r} {whole.count(before)} times"
        path.write_text(whole.replace(before, text + before), encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        (self.folder / "trader" / file).write_text(text, encoding="utf-8")

    def fails(self, code: str) -> str:
        """Run code that fails. Return the last line of its error."""
        done = self._run(code)
        assert done.returncode, done.stdout
        return done.stderr.strip().splitlines()[-1]

    def shows(self, code: str) -> object:
        """Run code. Return the JSON that it prints."""
        done = self._run(code)
        assert done.returncode == 0, done.stderr
        return orjson.loads(done.stdout)

    def _run(self, code: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, "-c", f"import json\n{code}"],
            cwd=self.folder, env=environ, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
