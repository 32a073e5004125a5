"""Confines a program that strangers may have written: what it sees and reaches, what it uses, and its end.

`kept` returns the command that runs it. Its first process is the service's handle: SIGTERM or its death ends the
program with all that it started. Its child, the keeper, is outside of the program's confinement: it starts the program,
watches over its memory and processes, and ends them all. `bubblewrap` confines the program where `can_confine` says
that it can run. The program calls `restrict` before it runs a stranger's code.
"""

import ctypes
import errno
import logging
import os
import platform
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

LIMITS: Final[Mapping[int, int]] = {
    resource.RLIMIT_AS: 4 << 30,
    resource.RLIMIT_FSIZE: 64 << 20,
    resource.RLIMIT_CPU: 2 * 3600,
    resource.RLIMIT_NPROC: 512,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
}
"""Limits of a process: bytes of address space and of a file, seconds of processor time, processes and threads of its
user, and open files."""

MEMORY_MAX: Final = LIMITS[resource.RLIMIT_AS]
"""Bytes of memory that the program and all that it started may use together."""

PROCESSES_MAX: Final = 16
"""How many processes there may be of the program, together with those of the confinement."""

WATCHED_EVERY_S: Final = 0.25

ENDED_AFTER_S: Final = 30.0
"""How long a program may run on after its input has ended."""

NICENESS: Final = 10
"""The program gives way to the service where they compete for a processor."""

NAMESPACES: Final = ("--unshare-pid", "--unshare-ipc", "--unshare-net")

VISIBLE: Final = (
    "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib32", "/lib64",
    "/etc/ld.so.cache", "/etc/localtime",
)  # fmt: skip
"""What a confined program sees of the machine, in addition to Python, this package, and its own files."""

VISIBLE_FOR_NETWORK: Final = (
    "/etc/ca-certificates", "/etc/hosts", "/etc/nsswitch.conf", "/etc/pki", "/etc/resolv.conf", "/etc/ssl",
    "/usr/share/ca-certificates",
)  # fmt: skip

PARTS_OF_PYTHON: Final = ("bin", "lib", "lib64", "pyvenv.cfg", "share/zoneinfo")
"""What a confined program sees of Python's folders, which may be the service's working folder."""

PACKAGE: Final = Path(__file__).parents[2]

log = logging.getLogger("trader.agents")


def kept(program: Sequence[str]) -> list[str]:
    """Return the command that runs a program under a keeper."""
    return [sys.executable, "-P", "-m", __name__, str(MEMORY_MAX), *program]


@cache
def can_confine() -> bool:
    """Return whether bubblewrap is installed and may make namespaces here; in most containers it may not."""
    if shutil.which("bwrap") is not None:
        words = ("bwrap", *NAMESPACES, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true")
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:  # noqa: S603 - fixed words
            return True
    log.warning("strategies run unconfined and can read what this user can, since bubblewrap (bwrap) cannot run here")
    return False


def bubblewrap(files: Iterable[Path], folder: Path, *, network: bool) -> Iterator[str]:
    """Yield the words before a program that runs in a folder, of which it sees these files, and little else.

    Each place is bound by itself into an empty file system, so that nothing that comes to the machine later is seen.
    All is read-only except /tmp and /dev/shm, which are empty and bounded. Without `network` it reaches no socket
    outside, not even this machine's.
    """
    yield from ("bwrap", "--die-with-parent", "--cap-drop", "ALL")
    yield from (word for word in NAMESPACES if not (network and word == "--unshare-net"))
    yield from ("--proc", "/proc", "--dev", "/dev")
    for place in ("/tmp", "/dev/shm"):  # noqa: S108 - its own
        yield from ("--size", str(LIMITS[resource.RLIMIT_FSIZE]), "--tmpfs", place)
    places = [*VISIBLE, *(VISIBLE_FOR_NETWORK if network else ())]
    for prefix in (Path(sys.base_prefix), Path(sys.base_prefix).resolve(), Path(sys.prefix)):
        places += [str(prefix / part) for part in PARTS_OF_PYTHON]
    places += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    for place in dict.fromkeys((*places, str(PACKAGE), *map(str, files))):
        yield from ("--ro-bind-try", place, place)
    yield from ("--dir", str(folder), "--chdir", str(folder))
    for place in ("/proc", "/dev", "/"):  # as root, even without capabilities, it could set the kernel's parameters
        yield from ("--remount-ro", place)
    yield "--"


# --- the keeper -------------------------------------------------------------------------------------------------------


def _keep(command: Sequence[str], memory_max: int, handle: int) -> str | None:
    """Run a command until it ends, its handle is gone or its input ended a while ago; return what it used too much of.

    A double fork leaves no process behind: the keeper is the parent of all orphans (on Linux).
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    program = subprocess.Popen(command, start_new_session=True)  # noqa: S603 - of `kept`
    poll = select.poll()
    poll.register(handle, select.POLLHUP)
    poll.register(0, select.POLLHUP)
    ends_at = float("inf")
    try:
        while program.poll() is None and time.monotonic() < ends_at:
            gone = [file for file, _ in poll.poll(WATCHED_EVERY_S * 1000)]
            if handle in gone:
                break
            if gone:
                poll.unregister(0)
                ends_at = time.monotonic() + ENDED_AFTER_S
            started = _started()
            if len(started) > PROCESSES_MAX:
                return f"the strategy has more than {PROCESSES_MAX} processes"
            if sum(map(_memory, started)) > memory_max:
                return f"the strategy and its processes use more than {memory_max >> 20} MiB of memory"
    finally:
        _end_all(program.pid)
    return None


def _started() -> list[int]:
    """Return the processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - some hundred names, four times a second
        if name.isdecimal():
            with suppress(OSError, IndexError):  # it has ended
                parent = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(name))
    found, below = [], [os.getpid()]
    while below:
        next_below = children.get(below.pop(), [])
        found += next_below
        below += next_below
    return found


def _memory(pid: int) -> int:
    """Return the bytes of memory that a process uses, also in the swap; shared ones count for each process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS:", "VmSwap:")))


def _end_all(program: int) -> None:
    """Kill all processes below this one: first the program's own, at once, so that none of them forks on."""
    with suppress(OSError):
        os.killpg(program, signal.SIGKILL)
    while True:
        for pid in _started():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there are none left
            return
        time.sleep(0.001)


def main() -> None:
    """Start the keeper, and be its handle: SIGTERM, or the death of this process or its parent, ends the program."""
    handle, keepers = socket.socketpair()
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: handle.shutdown(socket.SHUT_RDWR))
    keeper = os.fork()
    if keeper:
        keepers.close()
        poll = select.poll()
        poll.register(handle, select.POLLHUP)
        while os.getppid() == parent:
            if poll.poll(WATCHED_EVERY_S * 1000):
                os.waitpid(keeper, 0)
                break
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handle.close()
    if excess := _keep(sys.argv[2:], int(sys.argv[1]), keepers.fileno()):
        with suppress(OSError):  # the service has stopped reading
            os.write(1, f'{{"error":"{excess}"}}\n'.encode())


# --- the program ------------------------------------------------------------------------------------------------------


class _SystemCalls(NamedTuple):
    """Numbers of a machine's system calls, and the number of the machine itself; `refused` are refused always."""

    machine: int
    seccomp: int
    clone: int
    socket: int
    refused: Sequence[int]


_SYSTEM_CALLS: Final = {
    "x86_64": _SystemCalls(0xC000003E, 317, 56, 41, (
        319, 447, 29, 68, 272, 308, 435, 248, 249, 250, 425, 321, 298, 323, 101, 310, 311,
    )),
    "aarch64": _SystemCalls(0xC00000B7, 277, 220, 198, (
        279, 447, 194, 186, 97, 268, 435, 217, 218, 219, 425, 280, 241, 282, 117, 270, 271,
    )),
}  # fmt: skip
"""Refused are memory that no process shows (memfd_create, memfd_secret, shmget, msgget), namespaces, whose file systems
in memory would have no bound (unshare, setns, clone3), the service's keyrings (add_key, request_key, keyctl), and ways
into the kernel and other processes (io_uring_setup, bpf, perf_event_open, userfaultfd, ptrace, process_vm_readv and
process_vm_writev)."""

_NAMESPACE_FLAGS: Final = 0x7E020000
_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)
"""The families of sockets that stay within a network's namespace, with AF_NETLINK; AF_VSOCK does not."""

_LOAD, _EQUALS, _ABOVE, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOWED, _REFUSED, _KILLED = 0x7FFF0000, 0x00050000 | errno.ENOSYS, 0x80000000


def restrict() -> None:
    """Limit this process and all that it starts, for good. Raise `OSError` if the kernel does not."""
    for limit, most in LIMITS.items():
        hard = resource.getrlimit(limit)[1]
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (lowest, lowest))
    os.nice(NICENESS)
    calls = _SYSTEM_CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None:
        return
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _filter(calls))
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HL", len(code) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if libc.syscall(calls.seccomp, 1, 1, program):  # SECCOMP_SET_MODE_FILTER, in all threads
        raise OSError(ctypes.get_errno(), "the kernel refuses the filter of system calls")


def _filter(calls: _SystemCalls) -> Iterator[tuple[int, int, int, int]]:
    """Yield the instructions that judge a system call: code, jumps if true and if false, value."""
    yield from ((_LOAD, 0, 0, 4), (_EQUALS, 1, 0, calls.machine), (_RETURN, 0, 0, _KILLED))
    yield from ((_LOAD, 0, 0, 0), (_ABOVE, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILLED))  # the numbers of x32
    for number in calls.refused:
        yield from ((_EQUALS, 0, 1, number), (_RETURN, 0, 0, _REFUSED))
    yield from ((_EQUALS, 0, 3, calls.clone), (_LOAD, 0, 0, 16), (_HAS, 0, 1, _NAMESPACE_FLAGS))
    yield from ((_RETURN, 0, 0, _REFUSED), (_LOAD, 0, 0, 0))
    yield from ((_EQUALS, 1, 0, calls.socket), (_RETURN, 0, 0, _ALLOWED), (_LOAD, 0, 0, 16))
    for family in _FAMILIES:
        yield from ((_EQUALS, 0, 1, family), (_RETURN, 0, 0, _ALLOWED))
    yield (_RETURN, 0, 0, _REFUSED)


if __name__ == "__main__":
    main()
