"""Folders that another user can reach, for what a server that runs as `nobody` needs."""

import hashlib
import os
from pathlib import Path

from trader.errors import StartError

WORLD_EXECUTE = 0o001
WRITABLE_BY_OTHERS = 0o022
SHARED_FOLDERS = (Path("/var/lib/trader"), Path("/var/tmp/trader-root"))  # noqa: S108 - its owner is checked


def name_of(path: Path) -> str:
    """A short name, the same for the same path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def is_open_to_all(path: Path) -> bool:
    """Whether every user may pass through `path` and all folders above it (by their mode bits)."""
    path = path.resolve()
    return all(folder.stat().st_mode & WORLD_EXECUTE for folder in (path, *path.parents))


def shared_place(key: Path) -> Path:
    """A folder of root's, the same at every start and after a restart of the machine, that every user can reach.

    :raises StartError: there is none
    """
    for base in SHARED_FOLDERS:
        try:
            base.mkdir(mode=0o755, exist_ok=True)
            facts = base.lstat()
            # Everyone may write into the temporary folders: what is not ours there is not trusted.
            if facts.st_uid == os.geteuid() and not facts.st_mode & WRITABLE_BY_OTHERS and is_open_to_all(base):
                place = base / name_of(key)
                place.mkdir(mode=0o755, exist_ok=True)
                return place
        except OSError:
            continue
    raise StartError(
        "No folder was found that the user `nobody` can reach. Start as another user, or set DATABASE_URL."
    )
