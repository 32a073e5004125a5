"""Files named by people: only regular ones are opened, and some names mark secrets."""

import errno
import os
from pathlib import Path


def is_secret_name(name: str) -> bool:
    """Return whether files with this name usually hold settings, keys or the service's data: dotfiles and `*.env`."""
    return name.startswith(".") or name.endswith(".env")


def require_regular(file: Path) -> Path:
    """Return the path if it is a regular file: opening a FIFO or a device could block forever, even at exit.

    :raises OSError: it is not a regular file, or does not exist
    """
    if not file.is_file():
        code = errno.EINVAL if file.exists() and not file.is_dir() else errno.EISDIR if file.is_dir() else errno.ENOENT
        reason = "Not a regular file" if code == errno.EINVAL else os.strerror(code)
        raise OSError(code, reason, str(file))
    return file
