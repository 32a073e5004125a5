"""The streams under load and abuse, for a simulated minute; tests/benchmarks/streams.py has the long run."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.stream_readers import Follower, judged

SECOND_NS = 10**9


def follower(name: str, arrivals: dict[int, int], pings_ns: tuple[int, ...] = ()) -> Follower:
    """A follower that connected at 1 s, and received these marks and pings at these times."""
    result = Follower(name)
    result.note(b"HTTP/1.1 200 OK\r\n\r\n", SECOND_NS)
    for mark_ns, at_ns in arrivals.items():
        for part in (b'3f\r\ndata: [{"se', b'nt":%d}]\n\n\r\n' % mark_ns):
            result.note(part, at_ns)
    for at_ns in pings_ns:
        result.note(b"14\r\nevent: ping\ndata:\n\n\r\n", at_ns)
    return result


def test_an_update_has_arrived_once_all_have_it_or_a_newer_state() -> None:
    quick = follower("trades", {2_000_000: 3_000_000, 5_000_000: 6_000_000})
    slow = follower("trades", {5_000_000: 9_000_000})
    seen = judged([quick, slow], [2_000_000, 5_000_000], 3, SECOND_NS)
    assert (seen.first_ms, seen.last_ms) == ([1, 1], [7, 4])
    assert (seen.superseded, seen.missing, seen.last_ms_at(0.99)) == (1, 0, 7)


def test_a_message_that_never_arrives_is_infinitely_late() -> None:
    whole = follower("trades", {2_000_000: 3_000_000, 5_000_000: 6_000_000})
    for other in (follower("workflow", {5_000_000: 9_000_000}), follower("trades", {2_000_000: 9_000_000})):
        seen = judged([whole, other], [2_000_000, 5_000_000], 3, SECOND_NS)
        assert (seen.missing, len(seen.last_ms), seen.last_ms_at(0.99)) == (1, 1, float("inf"))


@pytest.mark.parametrize(
    ("pings_s", "late_s"), [((4, 7), 0), ((4.5, 7), 0.5), ((4,), 2), ((), 5), ((4, 7, 8), 2), ((3.5, 7), 0.5)]
)
def test_a_ping_is_late_until_it_arrives(pings_s: tuple[float, ...], late_s: float) -> None:
    reader = follower("trades", {}, tuple(round(at_s * SECOND_NS) for at_s in pings_s))
    assert judged([reader], [], 3, 9 * SECOND_NS).pings_late_s == pytest.approx(late_s)


@pytest.mark.processes
def test_abuse_of_the_streams_costs_the_others_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.streams", "1", "--shared", "--page-minutes", "0"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISSED" not in done.stdout
