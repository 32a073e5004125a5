"""Folders of the embedded PostgreSQL and the system user that owns them: data, socket, lock, and shared folders.

PostgreSQL refuses to run as root, so under root its server runs as a separate user, which needs folders open to every
user.
"""

import fcntl
import logging
import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path
from typing import IO

from trader.core.errors import StartError
from trader.core.ownership import LOCK_NAME, mark_made_here, name_of, why_not_made_here

log = logging.getLogger(__name__)

SOCKET_PATH_BYTES_MAX = 107
SOCKET_NAME = ".s.PGSQL.5432"
WORLD_EXECUTE = 0o001
WRITABLE_BY_OTHERS = 0o022
CONFIGURATION = ("postgresql.conf", "postgresql.auto.conf")
SIGNALS = ("recovery.signal", "standby.signal")
REACHES_OUT = re.compile(
    r"^\s*(include\w*|\w*(?:_command|_conninfo|_director(?:y|ies)|_file|_librar(?:y|ies)|_path|_provider))\b",
    re.MULTILINE | re.IGNORECASE,
)
"""Settings by which a server reaches out of its data: programs, libraries, files, other servers."""

SHARED_FOLDERS = (Path("/var/lib/trader"), Path("/var/tmp/trader-root"))  # noqa: S108 - its owner is checked


SERVER_USER = "trader-postgres"
OTHER_USER = "nobody"
"""The user that the server runs as under root: a dedicated one, or else one that other programs may share."""

SUPERUSER = "postgres"
SERVICE_ROLE = "trader"
"""The roles of the server: the one that creates databases, and the one that the service uses."""


def is_open_to_all(path: Path) -> bool:
    """Return whether the mode bits of `path` and all its parents let every user enter it."""
    path = path.resolve()
    return all(folder.stat().st_mode & WORLD_EXECUTE for folder in (path, *path.parents))


def shared_place(key: Path) -> Path:
    """Return a folder owned by root that every user can reach, the same one for `key` at every start.

    :raises StartError: no such folder can be created
    """
    for base in SHARED_FOLDERS:
        try:
            _make_open(base)
            facts = base.lstat()
            # Every user may write to the temporary folders: do not trust what another user created there.
            if facts.st_uid == os.geteuid() and not facts.st_mode & WRITABLE_BY_OTHERS and is_open_to_all(base):
                place = base / name_of(key)
                _make_open(place)
                return place
        except OSError:
            continue
    raise StartError("No folder was found that every user can reach. Start as another user, or set DATABASE_URL.")


def _make_open(folder: Path) -> None:
    """Create a folder that every user can enter, regardless of the umask; leave an existing one unchanged."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    folder.chmod(0o755)


def server_account() -> pwd.struct_passwd | None:
    """Return the server's user if this process is root; None if the server runs as this process's user.

    :raises StartError: the system has no such user
    """
    if os.geteuid() != 0:
        return None
    account = _account(SERVER_USER) or _account(OTHER_USER)
    if account is None:
        raise StartError(
            f"PostgreSQL does not run as root, and this system has neither a user `{SERVER_USER}` nor `{OTHER_USER}`. "
            "Start as another user, or set DATABASE_URL."
        )
    return account


def make_server_account() -> pwd.struct_passwd | None:
    """Return the server's user, creating it if it is missing and can be created.

    :raises StartError: as in `server_account`
    """
    if os.geteuid() == 0 and _account(SERVER_USER) is None and (reason := _make_server_user()) is not None:
        log.warning(
            "PostgreSQL runs as `%s`, whose other processes could disturb it: the user `%s` cannot be created (%s)",
            OTHER_USER, SERVER_USER, reason,
        )  # fmt: skip
    return server_account()


def _make_server_user() -> str | None:
    """Create a system user that cannot log in. Return the reason if that failed, or None."""
    program = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        return "there is no useradd"
    options = ("--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/false")
    lock = os.open("/etc", os.O_RDONLY)
    try:
        # Of two concurrent useradd, the later one replaces the entry, and the first server's user id has no name.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _account(SERVER_USER) is not None:
            return None
        made = subprocess.run([program, *options, SERVER_USER], capture_output=True, text=True, check=False)  # noqa: S603 - the system's program and our arguments
        return None if made.returncode == 0 else made.stderr.strip() or f"useradd ended with {made.returncode}"
    finally:
        os.close(lock)


def _account(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def hand_over(folder: Path, account: pwd.struct_passwd | None) -> None:
    """Make the server's user the owner of a folder and everything in it, such as after a start as another user.

    The folder itself comes last, so that an interrupted run is repeated.
    """
    if account is None or not folder.exists() or folder.lstat().st_uid == account.pw_uid:
        return
    log.info("handing %s over to the user `%s`", folder, account.pw_name)
    for path in (*folder.rglob("*"), folder):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)


def data_place(folder: Path, account: pwd.struct_passwd | None) -> Path:
    """Return the folder itself, or a shared folder in its place if `account` cannot reach it.

    :raises StartError: the folder cannot be created, or has another user's data
    """
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"The database folder {folder} cannot be created: {error.strerror}.") from error
    data = folder / "data"
    own = {0, *(known.pw_uid for known in (account, _account(OTHER_USER)) if known is not None)}
    if account is not None and data.exists() and (owner := data.stat().st_uid) not in own:
        raise StartError(
            f"The embedded database in {folder} belongs to another user ({owner}), and only that user may "
            "start it. Run this command as that user or, other than `check`, while its service runs."
        )
    if account is None or is_open_to_all(folder):
        return folder
    place = shared_place(folder.resolve())
    log.warning("PostgreSQL runs as `%s`, which cannot reach %s; the database is in %s", account.pw_name, folder, place)
    return place


def make_private(folder: Path, account: pwd.struct_passwd | None) -> None:
    """Create a folder that only the server's user can enter."""
    folder.mkdir(mode=0o700)
    if account is not None:
        os.chown(folder, account.pw_uid, account.pw_gid)


def require_peer(folder: Path) -> dict[str, str]:
    """Return the settings that restrict the server's connections to this process's user and root.

    Otherwise every process of the server's user could connect as its superuser. Before PostgreSQL 16, `all` is the name
    of a role.
    """
    try:
        names = {"root", pwd.getpwuid(os.geteuid()).pw_name}
    except KeyError:  # a container's user has no name by which the server could recognize it
        return {}
    mappings = [f'service "{name}" {role}' for name in sorted(names) for role in (SUPERUSER, SERVICE_ROLE, "all")]
    files = {
        "hba_file": ("pg_hba.conf", ["local all all peer map=service", "local replication all peer map=service"]),
        "ident_file": ("pg_ident.conf", mappings),
    }
    settings = {}
    for setting, (name, lines) in files.items():
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        unfinished.chmod(0o644)  # the server's user reads it, regardless of the umask
        settings[setting] = str(unfinished.rename(folder / name))
    return settings


def socket_folder(folder: Path, account: pwd.struct_passwd | None) -> Path:
    """Create the socket's folder: next to the data, unless that path is too long or unsafe in a list of hosts."""
    sockets = folder / "socket"
    path = str(sockets / SOCKET_NAME)
    if len(path) > SOCKET_PATH_BYTES_MAX or not re.fullmatch(r"[A-Za-z0-9/._-]+", path):
        sockets = Path(f"/tmp/trader-{name_of(folder)}")  # noqa: S108 - its owner is checked
    try:
        make_private(sockets, account)
    except FileExistsError:
        if sockets.parent == folder:  # nobody else can have created it there
            hand_over(sockets, account)
        facts = sockets.lstat()
        owner = account.pw_uid if account else os.geteuid()
        if facts.st_uid != owner or facts.st_mode & 0o077 or sockets.is_symlink():
            raise StartError(
                f"The folder {sockets} belongs to another user or is open to others. Remove it and start again."
            ) from None
    return sockets


def require_made_here(folder: Path) -> None:
    """Refuse a folder with contents that this user did not make at this place. Raises `OSError`.

    :raises StartError: somebody else made it, or could have changed it
    """
    if (reason := why_not_made_here(folder)) is not None:
        raise StartError(f"The embedded database in {folder} {reason}")


def mark_as_made(folder: Path) -> None:
    """Mark a folder as one that this user made.

    :raises StartError: the mark cannot be written
    """
    try:
        mark_made_here(folder)
    except (OSError, RuntimeError) as error:  # no home folder
        raise StartError(
            f"The mark that {folder} was made here cannot be written: {error}. Set XDG_STATE_HOME to a folder of this "
            "user that lasts."
        ) from error


def refuse_programs(data: Path) -> None:
    """Refuse a configuration that makes the server run programs, load libraries, read files or follow another server.

    :raises StartError: it has such a setting
    """
    for name in CONFIGURATION:
        file = data / name
        if file.is_symlink() or not file.is_file():
            raise StartError(f"The embedded database in {data} has no file {name} of its own.")
        if found := REACHES_OUT.search(file.read_text(encoding="utf-8", errors="replace")):
            raise StartError(
                f"The embedded database in {data} has the setting {found[1]} in {name}. It runs no programs and reads "
                "no other files: remove the setting, or run a PostgreSQL of your own and set DATABASE_URL."
            )
    for name in SIGNALS:
        if (data / name).exists():
            raise StartError(f"The embedded database in {data} has the file {name}, which makes it follow another one.")


def lock_folder(folder: Path) -> IO[str]:
    """Lock the folder for this process. The lock ends with the process, however the process ends."""
    file = (folder / LOCK_NAME).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise StartError(
            f"The database folder {folder} is in use by another trader (process {owner}). "
            "Stop that one, start in another folder, or set DATABASE_URL."
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
