"""The rules of alarms, for any order of alarms, conditions and looks: nothing is lost, and nobody is flooded."""

from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trader.domain.exchange.halts import Halt, HaltCause
from trader.domain.operations import alarms as rules
from trader.domain.operations.alarms import EVERY_S, Alarm, AlarmCause, AllHeld, Notice, alarm_of_halt

START = datetime(2026, 1, 1, tzinfo=UTC)
CAUSES = (
    AlarmCause("liquidation"),
    AlarmCause("provider", "nim"),
    AlarmCause("provider", "openai"),
    AlarmCause("halt"),
)
STEPS = st.lists(
    st.tuples(
        st.floats(0, 2 * EVERY_S), st.lists(st.sampled_from(CAUSES), max_size=4), st.frozensets(st.sampled_from(CAUSES))
    ),
    max_size=40,
)


@given(STEPS)
def test_every_alarm_is_counted_once_and_no_cause_is_heard_twice_an_hour(
    steps: list[tuple[float, list[AlarmCause], frozenset[AlarmCause]]],
) -> None:
    held: AllHeld = {}
    now_s, raised = 0.0, Counter[AlarmCause]()
    sent: defaultdict[AlarmCause, list[tuple[float, Notice]]] = defaultdict(list)
    for wait_s, causes, _ in steps:
        now_s += wait_s
        for cause in causes:
            raised[cause] += 1
            held = rules.add(held, Alarm(cause, f"number {raised[cause]}"), START + timedelta(seconds=now_s))
        due, held = rules.take_due(held, now_s)
        for notice in due:
            sent[notice.cause].append((now_s, notice))
            assert notice.text == f"number {raised[notice.cause]}", "it is the last one"
            assert notice.since <= notice.at
        for cause in causes:  # what is not sent now waits for the end of its hour, and for nothing else
            last_s = sent[cause][-1][0] if sent[cause] else None
            assert last_s is not None
            assert now_s - last_s < EVERY_S
    for cause, notices in sent.items():
        times = [at_s for at_s, _ in notices]
        assert all(later - earlier >= EVERY_S for earlier, later in pairwise(times)), times
        left = held[cause].waiting if cause in held else None
        assert sum(notice.count for _, notice in notices) + (left.count if left else 0) == raised[cause]


@given(STEPS)
def test_a_condition_is_heard_when_it_begins_and_once_an_hour_while_it_lasts(
    steps: list[tuple[float, list[AlarmCause], frozenset[AlarmCause]]],
) -> None:
    held: AllHeld = {}
    now_s, before, begun = 0.0, frozenset[AlarmCause](), Counter[AlarmCause]()
    last_s: dict[AlarmCause, float] = {}
    for wait_s, _, lasting in steps:
        now_s += wait_s
        begun.update(lasting - before)
        found = [Alarm(cause, "it lasts") for cause in sorted(lasting)]
        held = rules.add_conditions(held, before, found, START + timedelta(seconds=now_s), now_s)
        due, held = rules.take_due(held, now_s)
        for notice in due:
            assert now_s - last_s.get(notice.cause, -EVERY_S) >= EVERY_S
            last_s[notice.cause] = now_s
        assert all(now_s - last_s[cause] < EVERY_S for cause in lasting), "whatever lasts was heard within the hour"
        before = lasting


def test_what_is_held_does_not_grow_with_causes_of_the_past() -> None:
    held: AllHeld = {}
    for number in range(100):
        held = rules.add(held, Alarm(AlarmCause("provider", str(number)), "away"), START)
        _, held = rules.take_due(held, number * EVERY_S)
    assert len(held) == 1


def test_halts_of_accounts_share_a_cause_and_that_of_all_has_its_own() -> None:
    def halt(account_id: str | None, cause: HaltCause) -> Halt:
        return Halt(account_id=account_id, cause=cause, reason="asked", by="somebody", at=START)

    assert alarm_of_halt(halt("a", HaltCause.OPERATOR)).cause == AlarmCause("halt")
    assert alarm_of_halt(halt("b", HaltCause.DRAWDOWN)).cause == AlarmCause("loss limit")
    together = alarm_of_halt(halt(None, HaltCause.DAILY_LOSS))
    assert together == Alarm(AlarmCause("loss limit", "all accounts"), "all accounts: daily loss: asked")
