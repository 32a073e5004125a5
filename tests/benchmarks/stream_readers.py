"""Readers of the stream benchmark: a process that records when each frame of the event streams arrives.

A frame has arrived when the kernel has put it into its subscriber's socket, by the kernel's own timestamp
(SO_TIMESTAMPNS, Linux): how fast one process then reads hundreds of sockets says nothing about the service. Data read
in one piece has the time of its last packet, so a late reader can make an arrival later, never earlier.

The measured server runs on the first core of the machine, its callers on the last. Every publication is marked with its
time. A state stream may send a newer state instead of an older one; then the newer one is the arrival of both.
"""

import asyncio
import os
import re
import resource
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Final

import msgspec

STREAMS: Final = ("positions", "trades", "conversations", "portfolio", "workflow")
MARK: Final = re.compile(rb'"sent":(\d+)')
CORES: Final = os.sched_getaffinity(0)
ROOT: Final = Path(__file__).parents[1]
NEVER_NS: Final = 2**63
LAST_UPDATE_MAX_S: Final = 5.0
"""How long the readers wait for the last update: on a busy machine it takes longer than the time between two."""

SO_TIMESTAMPNS: Final = 35
"""Linux: delivers every message with its time of arrival (CLOCK_REALTIME); Python has no name for it."""


class Arrivals(msgspec.Struct):
    """The data received by the subscribers of one or more sessions, with its delays."""

    first_ms: list[float] = []
    last_ms: list[float] = []
    """Of the publications that all subscribers received: when the first and when the last one had it."""
    missing: int = 0
    """Publications of which some subscriber received neither the state nor a newer one."""
    superseded: int = 0
    """Publications of which some subscriber received only a newer state."""
    pings: int = 0
    pings_late_s: float = 0.0
    """The largest distance of a ping from its time; a missing one is late until the end."""
    lost: int = 0
    """Subscribers whose stream was ended."""

    def add(self, other: "Arrivals") -> None:
        self.first_ms += other.first_ms
        self.last_ms += other.last_ms
        self.missing += other.missing
        self.superseded += other.superseded
        self.pings += other.pings
        self.pings_late_s = max(self.pings_late_s, other.pings_late_s)
        self.lost += other.lost

    def last_ms_at(self, share: float) -> float:
        """Return the time in which this share of publications reached the last subscriber; infinite if never."""
        values = sorted(self.last_ms) + [float("inf")] * self.missing
        return values[min(int(len(values) * share), len(values) - 1)]


# -- the measuring process


def pin_server() -> None:
    """Pin this process to the first core; the processes that it starts move to another."""
    os.sched_setaffinity(0, {min(CORES)})


def leave_server_core() -> None:
    """Pin a calling process to the last core of the machine."""
    os.sched_setaffinity(0, {int(sys.argv[-1])})


async def start_caller(*arguments: str) -> asyncio.subprocess.Process:
    """Start a calling process; its last argument is its core."""
    command = (sys.executable, "-m", *arguments, str(max(CORES)))
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=2**26)


class Readers:
    """`subscribers` readers of every stream, in a separate process."""

    def __init__(self, port: int, subscribers: int, ping_s: float) -> None:
        self._arguments = ("benchmarks.stream_readers", str(port), str(subscribers), str(ping_s))

    async def start(self) -> None:
        self._process = await start_caller(*self._arguments)

    async def finish(self, marks_ns: Sequence[int]) -> Arrivals:
        """Disconnect all of them. `marks_ns` are the marks of the publications, in order."""
        async with asyncio.timeout(60):
            out, _ = await self._process.communicate(msgspec.json.encode(marks_ns))
        return msgspec.json.decode(out, type=Arrivals)


def stolen_s() -> float:
    """Return the steal time of the server's core since the machine started."""
    prefix = f"cpu{min(CORES)} "
    [line] = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(prefix)]
    return int(line.split()[8]) / os.sysconf("SC_CLK_TCK")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- the reading process


class Follower:
    """One subscriber: records when each marked frame and each ping had completely arrived in its socket."""

    def __init__(self, name: str) -> None:
        self.frames: list[tuple[int, int]] = []  # mark and arrival, in nanoseconds
        self.pings_ns: list[int] = []
        self.began_ns = 0
        self.has_ended = False
        self._gets_states = name != "workflow"
        self._rest = b""

    def receive(self, sock: socket.socket) -> None:
        """Read the received data."""
        try:
            data, ancillary, _, _ = sock.recvmsg(2**18, 64)
        except ConnectionError:
            data = b""
        if data:
            [(_, _, noted)] = ancillary
            seconds, nanoseconds = struct.unpack("qq", noted)
            self.note(data, seconds * 10**9 + nanoseconds)
        self.has_ended = not data

    def note(self, data: bytes, at_ns: int) -> None:
        """Record bytes that arrived at a time."""
        self.began_ns = self.began_ns or at_ns
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        for frame in frames:
            if b"event: ping" in frame:
                self.pings_ns.append(at_ns)
            elif mark := MARK.search(frame):
                self.frames.append((int(mark[1]), at_ns))

    def has_frame(self, mark_ns: int) -> bool:
        """Return whether this mark or a newer one has arrived."""
        return bool(self.frames) and self.frames[-1][0] >= mark_ns

    def arrivals_ns(self, marks_ns: Sequence[int]) -> Iterable[tuple[int, bool]]:
        """Yield for each mark when it or a newer state arrived, and whether it was a newer one."""
        frames = iter(self.frames)
        found_ns, at_ns = 0, 0
        for mark_ns in marks_ns:
            while found_ns < mark_ns:
                found_ns, at_ns = next(frames, (NEVER_NS, NEVER_NS))
            if found_ns == mark_ns:
                yield at_ns, False
            elif self._gets_states and found_ns != NEVER_NS:
                yield at_ns, True
            else:
                yield NEVER_NS, False

    def pings_late_s(self, ping_s: float, end_ns: int) -> float:
        """Return the largest deviation of a ping from its time, counted from the first bytes on."""
        late_s, number = 0.0, 0
        while (due_ns := self.began_ns + (number + 1) * ping_s * 1e9) < end_ns or number < len(self.pings_ns):
            at_ns = self.pings_ns[number] if number < len(self.pings_ns) else end_ns
            late_s = max(late_s, abs(at_ns - due_ns) / 1e9)
            number += 1
        return late_s


def subscribed(name: str, port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    sock.sendall(f"GET /api/events/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return sock


@contextmanager
def recording() -> Iterator[None]:
    """Let the kernel record times, which begins shortly after the first socket on the machine requests them."""
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        time.sleep(0.1)
        yield


def read(port: int, subscribers: int, ping_s: float) -> Arrivals:
    """Subscribe to every stream, and read until standard input delivers the publications and the last one arrives."""
    followers = []
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        for name in STREAMS * subscribers:
            followers.append(Follower(name))
            selector.register(subscribed(name, port), selectors.EVENT_READ, followers[-1])
        marks_ns: list[int] = []
        end_s = inf
        while (left_s := end_s - time.monotonic()) > 0 and not (
            marks_ns and all(follower.has_ended or follower.has_frame(marks_ns[-1]) for follower in followers)
        ):
            for key, _ in selector.select(None if left_s == inf else left_s):
                if key.data is None:
                    marks_ns = msgspec.json.decode(sys.stdin.buffer.read(), type=list[int])
                    end_s = time.monotonic() + LAST_UPDATE_MAX_S
                    selector.unregister(sys.stdin)
                    continue
                key.data.receive(key.fileobj)
                if key.data.has_ended:
                    selector.unregister(key.fileobj)
    return judged(followers, marks_ns, ping_s, time.time_ns())


def judged(followers: Sequence[Follower], marks_ns: Sequence[int], ping_s: float, end_ns: int) -> Arrivals:
    """Compare the followers' data with the publications up to `end_ns`."""
    result = Arrivals()
    for follower in followers:
        result.pings += len(follower.pings_ns)
        result.pings_late_s = max(result.pings_late_s, follower.pings_late_s(ping_s, end_ns))
        result.lost += follower.has_ended
    rounds = zip(*(follower.arrivals_ns(marks_ns) for follower in followers), strict=True)
    for mark_ns, arrivals in zip(marks_ns, rounds, strict=True):
        times_ns = [at_ns for at_ns, _ in arrivals]
        result.superseded += any(is_newer for _, is_newer in arrivals)
        if max(times_ns) == NEVER_NS:
            result.missing += 1
        else:
            result.first_ms.append((min(times_ns) - mark_ns) / 1e6)
            result.last_ms.append((max(times_ns) - mark_ns) / 1e6)
    return result


if __name__ == "__main__":
    leave_server_core()
    with recording():
        arrivals = read(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.buffer.write(msgspec.json.encode(arrivals))
