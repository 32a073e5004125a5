"""The rules of alarms, for any order of events, conditions and checks: each is reported once, with its end."""

from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trader.exchange.domain.halts import Halt, HaltCause
from trader.operations.domain import alarms as rules
from trader.operations.domain.alarms import (
    AFTERMATH_S,
    EVERY_S,
    EXPLAIN_WAIT_S,
    SETTLE_S,
    Alarm,
    AlarmCause,
    AlarmState,
    Notice,
    alarm_of_halt,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
DATABASE = AlarmCause("database")
CAUSES = (
    DATABASE,
    AlarmCause("market"),
    AlarmCause("scheduler", "tradeExecutor"),
    AlarmCause("provider", "nim"),
    AlarmCause("model", "ada"),
    AlarmCause("halt", "apex"),
)
EVENTS = (AlarmCause("liquidation", "apex"), AlarmCause("liquidation", "ada"), AlarmCause("takeover"))
STEPS = st.lists(
    st.tuples(
        st.floats(0.1, 60) | st.floats(0.1, 2 * EVERY_S),
        st.lists(st.sampled_from(EVENTS), max_size=3),
        st.frozensets(st.sampled_from(CAUSES)),
    ),
    max_size=60,
)


class Watch:
    """Checks alarms as the service does, and keeps the notices with their times."""

    def __init__(self) -> None:
        self.state = AlarmState()
        self.now_s = 0.0
        self.sent: list[tuple[float, Notice]] = []

    def look(self, *present: Alarm, after_s: float = 5.0) -> list[Notice]:
        self.now_s += after_s
        self.state, due = rules.look(self.state, present, self.at, self.now_s)
        self.sent += [(self.now_s, notice) for notice in due]
        return due

    def add(self, alarm: Alarm) -> None:
        self.state = rules.add_event(self.state, alarm, self.at, self.now_s)

    @property
    def at(self) -> datetime:
        return START + timedelta(seconds=self.now_s)


def alarm(
    kind: rules.NoticeKind, subject: str = "", text: str = "it is away", under: AlarmCause | None = None
) -> Alarm:
    return Alarm(AlarmCause(kind, subject), text, under)


def told(notices: list[Notice]) -> list[tuple[str, str]]:
    return [(notice.state, str(notice.cause)) for notice in notices]


@given(STEPS)
def test_every_fired_alarm_ends_and_no_other_does(
    steps: list[tuple[float, list[AlarmCause], frozenset[AlarmCause]]],
) -> None:
    watch = Watch()
    for wait_s, _, lasting in steps:
        watch.look(*(Alarm(cause, "it lasts") for cause in sorted(lasting)), after_s=wait_s)
        last = {notice.cause: notice.state for _, notice in watch.sent}
        firing = {each.alarm.cause for each in watch.state.firing()}
        assert firing == {cause for cause, state in last.items() if state == "firing"}
    watch.look(after_s=EVERY_S + SETTLE_S)
    watch.look(after_s=2 * EVERY_S)
    assert not watch.state.conditions
    watch.look(after_s=2 * EVERY_S)
    assert watch.state == AlarmState(), "no past state is kept"
    by_cause = defaultdict(list)
    for at_s, notice in watch.sent:
        by_cause[notice.cause].append((at_s, notice))
    for notices in by_cause.values():
        assert notices[0][1].state == "firing"
        assert notices[-1][1].state == "resolved"
        for (_, first), (_, second) in pairwise(notices):
            assert (first.state, second.state) != ("resolved", "resolved")


@given(st.lists(st.booleans(), min_size=720, max_size=720))
def test_a_flapping_condition_is_reported_only_a_few_times_an_hour(looks: list[bool]) -> None:
    watch = Watch()
    for holds in looks:
        watch.look(*[alarm("database")] if holds else [])
    assert len(watch.sent) <= 16, "its settle time doubles with each start"


@given(STEPS)
def test_every_event_is_counted_once_and_none_but_a_takeover_is_reported_twice_an_hour(
    steps: list[tuple[float, list[AlarmCause], frozenset[AlarmCause]]],
) -> None:
    watch, raised = Watch(), Counter[AlarmCause]()
    for wait_s, causes, _ in steps:
        watch.look(after_s=wait_s)
        for cause in causes:
            raised[cause] += 1
            watch.add(Alarm(cause, f"number {raised[cause]}"))
            watch.look(after_s=0)
    for cause, count in raised.items():
        notices = [(at_s, notice) for at_s, notice in watch.sent if notice.cause == cause]
        times = [at_s for at_s, _ in notices]
        is_held = cause.kind != "takeover"
        assert not is_held or all(later - earlier >= EVERY_S for earlier, later in pairwise(times)), times
        held = watch.state.events.get(cause)
        left = 0 if held is None or held.waiting is None else held.waiting.count
        assert sum(notice.count for _, notice in notices) + left == count


def test_one_notice_names_the_root_cause_and_its_consequences() -> None:
    watch = Watch()
    watch.add(alarm("takeover", text="this process has lost the leading role"))
    watch.look(after_s=0)
    database, scheduler = alarm("database"), alarm("scheduler", "tradeExecutor")
    assert watch.look(database) == []
    (notice,) = watch.look(database)
    lost = "takeover: this process has lost the leading role"
    assert (notice.state, notice.cause, notice.consequences) == ("firing", DATABASE, (lost,))
    for _ in range(10):
        assert watch.look(database, alarm("market"), scheduler) == []
    assert watch.look(scheduler) == []
    assert watch.look(scheduler) == []
    (notice,) = watch.look(scheduler)
    assert (notice.state, notice.cause) == ("resolved", DATABASE)
    assert set(notice.consequences) == {lost, "market", "scheduler tradeExecutor"}
    assert notice.at - notice.since == timedelta(seconds=55), "it ends when it was last seen"
    for _ in range(int(AFTERMATH_S / 5) - 1):
        assert watch.look(scheduler) == []
    assert told(watch.look(scheduler)) == [("firing", "scheduler tradeExecutor")], "it outlasts its explanation"


def test_a_model_is_reported_only_if_its_provider_does_not_explain_it() -> None:
    watch = Watch()
    sick, other = (alarm("model", name, under=AlarmCause("provider", "nim")) for name in ("ada", "bob"))
    assert told(watch.look(alarm("provider", "nim"), sick)) == [("firing", "provider nim")]
    alone = alarm("model", "eve", under=AlarmCause("provider", "openai"))
    assert watch.look(alarm("provider", "nim"), sick, other, alone) == []
    told_later = watch.look(alarm("provider", "nim"), sick, other, alone, after_s=EXPLAIN_WAIT_S)
    assert told(told_later) == [("firing", "model eve")], "it waited for an explanation"


def test_a_condition_that_ends_at_once_while_waiting_is_never_reported() -> None:
    watch = Watch()
    watch.look(alarm("scheduler", "tradeExecutor"))
    for _ in range(10):
        assert watch.look() == []


def test_a_single_failure_raises_no_alarm_and_an_intermittent_condition_raises_one() -> None:
    watch, database = Watch(), alarm("database")
    assert watch.look(database) == []
    for _ in range(70):
        assert watch.look(after_s=1) == []
    assert not watch.state.conditions, "it is forgotten"
    looks = [watch.look(*[database] if second % 12 < 2 else [], after_s=1) for second in range(60)]
    assert told([notice for due in looks for notice in due]) == [("firing", "database")], "five times in a minute"
    (condition,) = watch.state.firing()
    assert condition.count == 5


def test_a_notice_has_the_times_and_the_impact_of_the_fault() -> None:
    watch = Watch()
    began = watch.at - timedelta(seconds=9)
    locked = Alarm(DATABASE, "locked", since=began, impact="18 orders were refused")
    for _ in range(10):
        watch.look(locked, after_s=1)
    watch.look(after_s=1)
    (notice,) = watch.look(after_s=SETTLE_S)
    assert (notice.state, notice.impact) == ("resolved", "18 orders were refused")
    assert (notice.since, notice.at - notice.since) == (began, timedelta(seconds=19))


def test_every_change_of_the_leader_is_reported_even_if_its_condition_is_dropped() -> None:
    watch = Watch()
    for number in range(3):
        watch.add(alarm("takeover", text=f"term {number}"))
        watch.look(after_s=EXPLAIN_WAIT_S)
    assert [notice.text for _, notice in watch.sent] == ["term 0", "term 1", "term 2"], "regardless of earlier notices"
    watch.add(alarm("takeover", text="term 3"))
    watch.look(alarm("database"), after_s=0)
    assert [notice.text for notice in rules.flush(watch.state)] == ["term 3"], "pending notices are sent at shutdown"
    for _ in range(4):
        watch.look()
    assert [notice.text for _, notice in watch.sent][3:] == ["term 3"], (
        "a condition that is not reported explains nothing"
    )


def test_a_full_disk_is_one_notice() -> None:
    watch = Watch()
    full = [alarm("database", text="disk full"), alarm("disk")]
    for _ in range(20):
        watch.look(*full, after_s=1)
    ((_, notice),) = watch.sent
    assert (notice.cause, notice.consequences) == (DATABASE, ("disk",))


def test_lasting_conditions_repeat_after_an_hour_but_halts_do_not() -> None:
    watch = Watch()
    present = [alarm("market"), alarm("halt", "apex")]
    watch.look(*present)
    watch.look(*present, after_s=EXPLAIN_WAIT_S)
    assert told(watch.look(*present, after_s=EVERY_S)) == [("firing", "market")]


def test_halts_and_loss_limits_are_reported_per_account_and_end_at_once() -> None:
    def halt(account_id: str | None, cause: HaltCause) -> Halt:
        return Halt(account_id=account_id, cause=cause, reason="asked", by="somebody", at=START)

    watch = Watch()
    halts = [alarm_of_halt(halt(str(number), HaltCause.DRAWDOWN)) for number in range(7)]
    assert len(watch.look(*halts)) == 7, "none is withheld because another fired"
    assert told(watch.look(*halts[1:])) == [("resolved", "loss limit 0")]
    together = alarm_of_halt(halt(None, HaltCause.OPERATOR))
    assert together == Alarm(AlarmCause("halt", "all accounts"), "all accounts: operator: asked")
    both = [alarm_of_halt(halt("a", cause)) for cause in (HaltCause.DRAWDOWN, HaltCause.DAILY_LOSS)]
    (notice,) = watch.look(*halts[1:], *both)
    assert notice.text == "account a: drawdown: asked; account a: daily loss: asked"


def test_an_event_that_is_also_a_condition_is_reported_once() -> None:
    watch = Watch()
    watch.add(alarm("reconciliation", "apex", "the venue holds 1 BTC more"))
    watch.look(after_s=0)
    watch.look(alarm("reconciliation", "apex"))
    watch.look(alarm("reconciliation", "apex"), after_s=EXPLAIN_WAIT_S)
    assert told([notice for _, notice in watch.sent]) == [("firing", "reconciliation apex")]
