"""Rate limits per minute."""

from hypothesis import given
from hypothesis import strategies as st

from trader.operations.domain.credentials import TokenBucket


@given(
    per_minute=st.integers(1, 1000),
    gaps=st.lists(st.floats(0, 200, allow_nan=False), min_size=1, max_size=200),
)
def test_no_minute_exceeds_twice_its_requests_and_a_wait_is_never_too_short(per_minute: int, gaps: list[float]) -> None:
    now_s, bucket = 0.0, TokenBucket(per_minute, 0.0)
    taken: list[float] = []
    for gap in gaps:
        now_s += gap
        wait_s = bucket.take(now_s)
        if wait_s > 0:
            now_s += wait_s + 1e-6
            assert bucket.take(now_s) == 0
        taken.append(now_s)
        assert sum(at > now_s - 60 for at in taken) <= 2 * per_minute + 1
