"""Ownership: whether this user made a folder, or somebody else may have.

A folder may come from a stranger with everything in it, so the mark of one that this user made is outside of it: in
systemd's STATE_DIRECTORY, in XDG_STATE_HOME, or in ~/.local/state.
"""

import hashlib
import os
import re
import secrets
import shlex
import stat
from pathlib import Path
from typing import Final

EMBEDDED_FOLDER: Final = Path(".trader/postgres")
"""The folder of the embedded database, in the working folder."""

LOCK_NAME: Final = "launcher.lock"
"""The lock of a folder's server: all that a start that was killed at once leaves in it."""

_MADE: Final = "made"
_MADE_FORM: Final = re.compile(r"[0-9a-f]{32}")


def name_of(path: Path) -> str:
    """Return a short name derived from the path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def why_not_own(path: Path) -> str | None:
    """Return how a user other than this one and root could have written a file or folder; None if none could.

    A group may write if it is this user's own. Raises `OSError`.
    """
    facts = path.stat()
    if facts.st_uid not in {0, os.geteuid()}:
        return f"belongs to another user ({facts.st_uid})"
    if stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX:
        return None
    others = stat.S_IWOTH | (0 if facts.st_gid == os.getegid() else stat.S_IWGRP)
    return f"can be changed by other users (chmod go-w {shlex.quote(str(path))})" if facts.st_mode & others else None


def why_not_made_here(folder: Path) -> str | None:
    """Return why a folder with contents is not one that this user made at this place; None if it is, or is empty.

    Raises `OSError`.
    """
    if (reason := why_not_own(folder)) is not None:
        return reason
    entries = list(folder.iterdir())
    if (link := next((entry.name for entry in entries if entry.is_symlink()), None)) is not None:
        return f"has a link instead of its own {link}"
    if {entry.name for entry in entries} <= {LOCK_NAME}:
        return None
    mark, token = _mark_of(folder), _token_of(folder)
    if mark.is_file() and mark.read_text().strip() == token:
        return None
    adopt = f"mkdir -p {shlex.quote(str(mark.parent))} && echo {token} > {shlex.quote(str(mark))}"
    return (
        "was not made here by this user, and may run programs of whoever made it. If it is yours, moved or copied to "
        f"this place, adopt it: {adopt}"
    )


def mark_made_here(folder: Path) -> None:
    """Mark a folder as one that this user made at this place, unless it is marked. Raises `OSError`."""
    if _token_of(folder):
        return
    mark, token = _mark_of(folder), secrets.token_hex(16)
    mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark.write_text(f"{token}\n")  # first: a kill leaves a folder that is still empty
    with os.fdopen(os.open(folder / _MADE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(f"{token}\n")


def _mark_of(folder: Path) -> Path:
    state = os.environ.get("STATE_DIRECTORY", "").split(":")[0] or os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local/state") / "trader" / f"made-{name_of(folder.resolve())}"


def _token_of(folder: Path) -> str:
    """Return the random text that tells a folder from another one at the same place; empty if it has none."""
    file = folder / _MADE
    if file.is_symlink() or not file.is_file():
        return ""
    with file.open(encoding="ascii", errors="replace") as opened:
        text = opened.read(64).strip()
    return text if _MADE_FORM.fullmatch(text) else ""
