"""Every limit at n and n + 1: what is just allowed is accepted, and the next one is not."""

import asyncio
import json
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final, cast
from uuid import uuid4

import msgspec
import orjson
import pytest
from support.books import DEFAULT_MARKETS
from support.feed import START, ScriptedSource, after, tick
from support.limits import Accepts, outcomes
from support.manual_clock import ManualClock
from support.records import make_account, make_model
from support.waiting import turns, until

from trader.agents.domain.as_written import with_calls_of_text
from trader.agents.domain.conversation import ModelAnswer, ToolRequest, storable
from trader.agents.domain.invocations import Invocation
from trader.agents.domain.memory import LINE_MAX, shortened
from trader.agents.domain.tools import BadCall, decode
from trader.agents.model_warnings import ConsecutiveFailures
from trader.agents.payloads import answers_of
from trader.agents.providers.keys import KEY_REFUSED, OUT_OF_CREDIT, RATE_LIMITED, KeyRing
from trader.agents.providers.replies import answer_of, decode_reply
from trader.agents.record import InvocationRecord
from trader.agents.slots import Batch, QueuedModel, Slots, slot_name
from trader.api import batch
from trader.api.broadcast import Broadcaster, EventBroadcaster, EventRing
from trader.api.requests import WaitingBodies
from trader.api.response_cache import Answer, ResponseCache
from trader.api.schemas.analytics import GetFailuresInput
from trader.api.schemas.evidence import GetComparisonOutput
from trader.api.stream_messages import EventsMessage, NumberedEvent
from trader.api.subscriber import Subscriber
from trader.core.clock import JumpWatch, ScaledClock, input_time
from trader.core.errors import (
    InvalidInput,
    MarketUnavailable,
    PayloadTooLarge,
    SettingsError,
    SinkUnavailable,
    TooManyRequests,
    Unavailable,
)
from trader.core.files import decode_json, read_lines, read_regular
from trader.core.inputs import decode_input
from trader.database.embedded.folders import SOCKET_NAME, socket_folder
from trader.database.embedded.server import database_name
from trader.database.pool import Database
from trader.exchange.domain.order_validation import NOTIONAL_MAX, refusal_of_size
from trader.exchange.domain.orders import Order, OrderSide
from trader.exchange.domain.tick_order import DateSpans, add_span
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.service_level import ServiceLevel
from trader.market.domain.markets import untimely
from trader.market.feed import MarketFeed
from trader.operations.access import Access, Caller, issue
from trader.operations.alarms import ClockWatch, Outlet
from trader.operations.domain import alarms as alarm_rules
from trader.operations.domain.alarms import Alarm, AlarmCause, AlarmState, Notice
from trader.operations.domain.credentials import AGENT_MARK, TokenBucket
from trader.operations.domain.loss_limits import LossThresholds, advance, begin, breach
from trader.portfolio.domain.behaviour import Stance
from trader.portfolio.domain.board import Comparison
from trader.portfolio.domain.evidence import Statement, Verdict
from trader.portfolio.evidence import PairEvidence
from trader.seasons.bundle import list_bundle
from trader.settings.forms import Secret
from trader.settings.toml_lines import decode_toml

MS: Final = timedelta(milliseconds=1)
LAST_INPUT: Final = datetime(2200, 1, 1, tzinfo=UTC)
D = Decimal


def refuses(error: type[Exception] | tuple[type[Exception], ...], act: Callable[[], object]) -> bool:
    try:
        act()
    except error:
        return True
    return False


# --- core and settings ------------------------------------------------------------------------------------------------


def reads_file(size: int, _: pytest.MonkeyPatch, folder: Path) -> bool:
    (folder / "file").write_bytes(b"x" * size)
    return not refuses(OSError, lambda: read_regular(folder / "file", 1000))


def reads_line(size: int, patch: pytest.MonkeyPatch, folder: Path) -> bool:
    patch.setattr("trader.core.files.LINE_BYTES_MAX", 1000)
    (folder / "file").write_bytes(b"x" * (size - 1) + b"\nnext\n")
    return not refuses(OSError, lambda: list(read_lines(folder / "file")))


def is_value(read: Callable[[], object]) -> bool:
    return not refuses((ValueError, RecursionError, PayloadTooLarge), read)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def tells_number(twos: int, *_: object) -> bool:
    """Return whether a whole number above 2^53, written with a point, is read as one."""
    decoder = msgspec.json.Decoder(GetFailuresInput)
    try:
        decode_input(decoder, GetFailuresInput, b'{"skip":%d.0}' % (2**53 + 2 * twos))
    except InvalidInput as error:
        return ".0" not in str(error)
    return False


def shows_value(length: int, *_: object) -> bool:
    decoder = msgspec.json.Decoder(GetFailuresInput)
    try:
        decode_input(decoder, GetFailuresInput, b'{"skip":"%b"}' % (b"x" * (length - 2)))
    except InvalidInput as error:
        return "…" not in str(error)
    return False


def jumps_little(ms: int, *_: object) -> bool:
    set_by = timedelta(0)
    watch = JumpWatch(lambda: START + set_by, lambda: 0.0)
    set_by = ms * MS
    return watch.jump() is None


async def is_due_at_once(ms: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    """Return whether a tick is due at once in a replay that has fallen behind by seconds."""
    second = 0.0
    patch.setattr("trader.core.clock.time", SimpleNamespace(monotonic=lambda: second))
    clock = ScaledClock(START, 1.0)
    second = 10.0
    due = asyncio.create_task(clock.advance_to(START + ms * MS))
    await turns(3)
    return due.done() or not due.cancel()


def has_socket(size: int, *_: object) -> bool:
    with TemporaryDirectory(prefix="t", dir="/tmp") as short:
        folder = Path(short) / ("x" * (size - len(f"{short}//socket/{SOCKET_NAME}")))
        folder.mkdir()
        sockets = socket_folder(folder, None)
        sockets.rmdir()
        return sockets.parent == folder


# --- operations -------------------------------------------------------------------------------------------------------


def at_second(patch: pytest.MonkeyPatch, second: float) -> None:
    patch.setattr("trader.operations.access.time", SimpleNamespace(monotonic=lambda: second))


async def answers_wrong(access: Access, count: int, address: str = "there") -> bool:
    """Return whether the last of `count` wrong secrets is still checked, rather than refused unseen."""
    for number in range(count):
        try:
            await access.identify(f"Bearer guess-{number}", address)
        except TooManyRequests:
            return False
    return True


async def guesses(count: int, *_: object) -> bool:
    return await answers_wrong(Access(None, Secret("t" * 32)), count)


async def stays_blocked(ms: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    access = Access(None, Secret("t" * 32))
    at_second(patch, 1000.0)
    await answers_wrong(access, 10)
    at_second(patch, 1000.0 + ms / 1000)
    return not await answers_wrong(access, 1)


async def guesses_later(count: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    """A later minute begins with no wrong secrets."""
    access = Access(None, Secret("t" * 32))
    at_second(patch, 1000.0)
    await answers_wrong(access, 10)
    at_second(patch, 1061.0)
    return await answers_wrong(access, count)


async def remembers_addresses(count: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    patch.setattr("trader.operations.access.ADDRESSES_MAX", 3)
    access = Access(None, Secret("t" * 32))
    for number in range(count):
        await answers_wrong(access, 10, f"address {number}")
    return not await answers_wrong(access, 1, "address 0")


def takes_tokens(count: int, *, idle_s: float = 0.0) -> bool:
    bucket = TokenBucket(5, 0.0)
    return [bucket.take(idle_s) for _ in range(count)][-1] == 0


def admits_after_change(count: int, *unused: object) -> bool:
    """The limit of a key that an operator changes is the new one at once."""
    access, key = Access(None, None), issue(AGENT_MARK, "a", START, ("read",), requests_per_minute=2)[1]
    access.admit(Caller(key))
    changed = Caller(msgspec.structs.replace(key, requests_per_minute=5))
    return not any(refuses(TooManyRequests, lambda: access.admit(changed)) for _ in range(count))


NOTICE: Final = Notice(state="firing", cause=AlarmCause("database"), text="", at=START, since=START)


class HeldSink:
    """A sink that answers once the test lets it; `error` is what it answers so many times, or always."""

    name = "held"

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.error: Exception | None = None
        self.failures_left = 1_000_000
        self.received: list[str] = []
        self.tries = 0

    async def send(self, notice: Notice) -> None:
        self.tries += 1
        await self.let.wait()
        if self.error is not None and self.failures_left:
            self.failures_left -= 1
            raise self.error
        self.received.append(notice.text)

    async def close(self) -> None: ...


async def queues_notices(count: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    """Beyond the limit the oldest is dropped that is not being sent."""
    patch.setattr("trader.operations.alarms.QUEUE_MAX", 3)
    sink = HeldSink()
    outlet = Outlet(sink, lambda: 0.0, (0.0,))
    for number in range(count):
        outlet.put(msgspec.structs.replace(NOTICE, text=str(number)))
        await turns(2)
    sink.let.set()
    await until(lambda: not len(outlet))
    kept = [str(number) for number in range(count) if number != 1 or count <= 3]
    assert sink.received == kept
    await outlet.close(0)
    return outlet.outcomes["dropped"] == 0


async def sends_after(failures: int, *_: object) -> bool:
    """Each row of failures begins with the first pause, here none; the second one is longer than any test."""
    sink = HeldSink()
    sink.let.set()
    outlet = Outlet(sink, lambda: 0.0, (0.0, 1000.0))
    for row in (1, failures):
        sink.error, sink.failures_left = SinkUnavailable("away"), row
        outlet.put(NOTICE)
        await until(lambda: not sink.failures_left)
        await turns(20)
    is_sent = not len(outlet)
    await outlet.close(0)
    return is_sent


async def tries_again(ms: int, *_: object) -> bool:
    """A sink that is away is tried again for some time; then the next notice is next."""
    now_s, sink = 0.0, HeldSink()
    outlet = Outlet(sink, lambda: now_s, (0.0,))
    outlet.put(NOTICE)
    await turns(2)
    now_s, sink.error = ms / 1000, SinkUnavailable("away", is_temporary=True)
    sink.let.set()
    await until(lambda: sink.tries > 1 or outlet.outcomes["failed"] > 0)
    await outlet.close(0)
    return outlet.outcomes["failed"] == 0


DATABASE: Final = Alarm(AlarmCause("database"), "away")


def look(*looks: tuple[float, bool]) -> list[str]:
    """Return the states of the notices after looks at these seconds, each with whether the condition held."""
    state = AlarmState()
    said: list[str] = []
    for now_s, holds in looks:
        state, due = alarm_rules.look(state, [DATABASE] if holds else [], START, now_s)
        said += [notice.state for notice in due]
    return said


def sends_event_again(ms: int, *_: object) -> bool:
    state, alarm = AlarmState(), Alarm(AlarmCause("books", "a"), "refused")
    due: list[Notice] = []
    for now_s in (0.0, ms / 1000):
        state, due = alarm_rules.look(alarm_rules.add_event(state, alarm, START, now_s), [], START, now_s)
    return bool(due)


def stays_unlimited(lost: int, *_: object) -> bool:
    thresholds = LossThresholds(daily_loss=D(10))
    start = begin(uuid4(), D(10_000), D(10_000), START.date())
    return breach(advance(start, D(10_000 - lost), START.date()), thresholds) is None


def reports_jump(ms: int, *_: object) -> bool:
    now_s, jumped = 0.0, timedelta(0)
    watch = ClockWatch(lambda: START + timedelta(seconds=now_s) + jumped, lambda: now_s)
    assert not list(watch.problems())
    jumped = timedelta(hours=1)
    assert list(watch.problems())
    now_s = ms / 1000
    return bool(list(watch.problems()))


# --- agents -----------------------------------------------------------------------------------------------------------


def answers(calls: int) -> bool:
    asked = {"name": "holding", "arguments": "{}"}
    each = [{"id": f"c{number}", "type": "function", "function": asked} for number in range(calls)]
    message = {"role": "assistant", "content": None, "tool_calls": each}
    turn: Any = SimpleNamespace(number=1, answer_tokens_max=1, model=make_model("m"))
    answer = answer_of(decode_reply(orjson.dumps({"choices": [{"message": message}]})), turn, None, 0)
    assert len(answer.calls) + answer.calls_left_out == calls
    return answer.calls_left_out == 0


def reads_calls(calls: int, *_: object) -> bool:
    text = 'holding[ARGS]{"reason":"x"}' * calls
    answer = ModelAnswer(text=text, calls=(), message={}, model="m")
    return len(with_calls_of_text(answer, 1).calls) == calls


def hides(nested: int, *_: object) -> bool:
    """Return whether a secret is found in JSON that is nested in strings so often."""
    text = '"\\u0073ecret-of-twenty-digits"'
    for _each in range(nested):
        text = json.dumps(text)
    ring = KeyRing("p", [Secret("secret-of-twenty-digits")], lambda: 0.0)
    return b"ecret-of" not in ring.scrub(text.encode())


def records_response(size: int, *_: object) -> bool:
    record = InvocationRecord(make_model("m"), START)
    record.close("completed", "holding", None, "x" * size, START)
    return len(record.invocation.response or "") == size


def records_name(size: int, *_: object) -> bool:
    record = InvocationRecord(make_model("m"), START)
    answer = ModelAnswer(text="", calls=(), message={}, model="x" * size)
    return len(record.add_step("p", answer, START).model) == size


def shows_answers(sizes: list[int], each_max: int, most: int) -> bool:
    made = [Invocation(id=uuid4(), model_id="m", status="completed", started_at=START) for _ in sizes]
    payload = {
        each.id: zlib.compress(b'{"answers":["%b"]}' % (b"x" * (size - 4)))
        for each, size in zip(made, sizes, strict=True)
    }
    return len(answers_of(made, payload, each_max, most)) == len(sizes)


def is_silent(failures: int, *unused: object) -> bool:
    model, counted = make_model("m"), ConsecutiveFailures()
    for _ in range(failures):
        counted.add(Invocation(id=uuid4(), model_id="m", status="failed", started_at=START, failure_reason="it broke"))
    return not counted.failing([model])


def gives_slots(count: int, *unused: object) -> bool:
    slots, model = Slots(2), make_model("m")
    for _number in range(count):
        slots.add(QueuedModel(model, Batch(("m",)), START))
    return [slots.take(slot_name(model)) for _ in range(count)][-1] is not None


def rests(refusal: Any, ms: int, times: int = 1) -> bool:
    """Return whether a key still rests so long after it was refused so many times, each as soon as it was free."""
    now_s, model = 0.0, make_model("m")
    ring = KeyRing("p", [Secret("k" * 20)], lambda: now_s)
    for _ in range(times):
        now_s += ring.free_in_s(model)
        key = ring.take(model)
        assert key is not None
        ring.cool_down(key, model, refusal, "429")
    now_s += ms / 1000
    return ring.take(model) is None


# --- market and exchange ----------------------------------------------------------------------------------------------


async def lets_wait(count: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    patch.setattr("trader.market.feed.WAITERS_MAX", 3)
    market = MarketFeed(ScriptedSource(), ManualClock(START))
    waiting = [asyncio.create_task(market.quote_after("BTC", START)) for _ in range(count)]
    await turns(3)
    refused = [each for each in waiting if each.done() and isinstance(each.exception(), MarketUnavailable)]
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    return not refused


async def waits_for_price(ms: int, *_: object) -> bool:
    clock = ManualClock(START)
    market = MarketFeed(ScriptedSource(), clock)
    waiting = asyncio.create_task(market.quote_after("BTC", START))
    await turns(2)
    await clock.advance(ms * MS)

    async def nothing(_: object) -> None: ...

    await market.take(tick(ms / 1000), nothing)
    with suppress(MarketUnavailable):
        return (await waiting).at == after(ms / 1000)
    return False


async def keeps_candles(count: int, *_: object) -> bool:
    return len(await MarketFeed(ScriptedSource(), ManualClock(START)).candles("BTC", "1m", count)) == count


async def keeps_ticks(count: int, *_: object) -> bool:
    market = MarketFeed(ScriptedSource(), ManualClock(START))

    async def nothing(_: object) -> None: ...

    for second in range(count):
        await market.take(tick(second), nothing)
    return market.recent()[0].at == START


def is_sized(quantity: Decimal, price: Decimal) -> bool:
    order = Order(account_id="a", symbol="BTC", side=OrderSide.BUY, quantity=quantity)
    return refusal_of_size(make_account("a"), order, quantity, price, DEFAULT_MARKETS["BTC"]) is None


def is_slow(durations_s: list[float], ago_s: float = 0.0) -> bool:
    now_s = 0.0
    level = ServiceLevel(lambda: now_s)
    for took_s in durations_s:
        with level.posting():
            now_s += took_s
    now_s += ago_s
    return level.slow_s() is not None


async def writes_at_once(count: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    batches: list[int] = []

    async def write(_: object, postings: list[Any], term: int) -> set[str]:
        batches.append(len(postings))
        return {posting.account.id for posting in postings}

    patch.setattr("trader.exchange.ledger_writer.write_postings", write)
    writer = LedgerWriter(cast("Database", SimpleNamespace(writing=nullcontext)))
    postings: Any = [SimpleNamespace(account=make_account(f"a{number}")) for number in range(count)]
    waiting = [asyncio.create_task(writer.write(posting)) for posting in postings]
    await turns(1)
    writer.start(1)
    await asyncio.gather(*waiting)
    await writer.close()
    return batches == [count]


# --- portfolio and seasons ------------------------------------------------------------------------------------------


def names_entries(count: int, _: pytest.MonkeyPatch, folder: Path) -> bool:
    for number in range(count):
        (folder / f"{number}").touch()
    try:
        list_bundle(folder)
    except SettingsError as error:
        return str(error).count("does not belong") == count
    return False


def shows_disagreements(count: int, *_: object) -> bool:
    nothing = Statement(0, None, "too short")
    comparison = Comparison("bestOther", None, nothing, Verdict(nothing, 1.0))
    apart = [Stance("BTC", START, START + MS, "LONG", None)] * count
    return len(GetComparisonOutput.of("run", PairEvidence(START, comparison, [], apart)).disagreements) == count


# --- api --------------------------------------------------------------------------------------------------------------


async def caches(sizes: list[int]) -> bool:
    kept = ResponseCache(entries_max=3, bytes_max=100)
    for number, size in enumerate(sizes):

        async def make(size: int = size) -> Answer:
            return Answer(200, b"x" * size)

        await kept.make(("a", b"%d" % number), 1, make)
    return all(kept.find(("a", b"%d" % number), 1) is not None for number in range(len(sizes)))


def keeps_first_span(count: int, *_: object) -> bool:
    spans: DateSpans = ()
    for number in range(count):
        spans = add_span(spans, START + 2 * number * MS, START + (2 * number + 1) * MS)
    assert spans[-1].until == START + (2 * count - 1) * MS, "the latest is kept"
    return spans[0].since == START


async def receives(size: int, *_: object) -> bool:
    bodies = WaitingBodies()
    try:
        async with asyncio.timeout(None) as deadline:
            bodies.grow(deadline, size)
            await turns(3)
    except TimeoutError:
        assert bodies.bytes == 0
        return False
    return bodies.bytes == size


def has_place(count: int, *, known: bool) -> bool:
    stream = Broadcaster("s", capacity=3)
    others = [Subscriber(address=f"address {number}", is_known=known) for number in range(count)]
    return not any(refuses(Unavailable, lambda: stream.add(each)) for each in others)  # noqa: B023 - called at once


async def gathers(count: int, *unused: object) -> bool:
    stream, subscriber = EventBroadcaster("w", EventRing(lambda name: name.encode())), Subscriber()
    stream.add(subscriber)
    subscriber.take()
    for _ in range(count):
        stream.post("e", b"{}")
    sent = subscriber.take()
    await stream.close()
    return not sent


def queues_events(size: int, *_: object) -> bool:
    subscriber, empty = Subscriber(backlog_bytes_max=100), len(EventsMessage([NumberedEvent("e", b"", "")]).text(False))
    assert subscriber.offer(EventsMessage([NumberedEvent("e", b"x" * 1000, "")])), "the first may have any size"
    return subscriber.offer(EventsMessage([NumberedEvent("e", b"x" * (size - empty), "")]))


LIMITS: Final[dict[str, tuple[int, Accepts]]] = {
    "core: the bytes of a file": (1000, reads_file),
    "core: the bytes of a line": (1000, reads_line),
    "core: the depth of JSON": (50, lambda n, *_: is_value(partial(decode_json, nested(n), object))),
    "core: the last time of an input": (0, lambda n, *_: is_value(partial(input_time, LAST_INPUT + n * MS))),
    "core: numbers with a point that are whole": (0, tells_number),
    "core: characters of a value that are shown": (60, shows_value),
    "core: how far a clock is set unnoticed": (1000, jumps_little),
    "core: how far a replay catches up": (1000, is_due_at_once),
    "database: bytes of a socket's path": (107, has_socket),
    "database: characters of a database's name": (56, lambda n, *_: len(database_name("x" * n)) == n + 7),
    "settings: the depth of TOML": (49, lambda n, *_: is_value(partial(decode_toml, b"table = " + nested(n)))),
    "operations: wrong secrets of an address": (10, guesses),
    "operations: the time that it stays blocked": (59_999, stays_blocked),
    "operations: wrong secrets after that": (10, guesses_later),
    "operations: addresses that are remembered": (3, remembers_addresses),
    "operations: requests of a key at once": (5, lambda n, *_: takes_tokens(n)),
    "operations: requests of a key after an hour": (5, lambda n, *_: takes_tokens(n, idle_s=3600)),
    "operations: requests of a key whose limit was raised": (5, admits_after_change),
    "operations: notices that wait for a sink": (3, queues_notices),
    "operations: failures before a longer pause": (1, sends_after),
    "operations: how long a sink is tried again": (599_999, tries_again),
    "operations: how long a condition is no alarm": (4999, lambda n, *_: not look((0, True), (n / 1000, True))),
    "operations: how often a condition is no alarm": (
        2,
        lambda n, *_: not look(*((second, second % 2 == 0) for second in range(2 * n - 1))),
    ),
    "operations: how long an alarm lasts that is away": (
        14_999,
        lambda n, *_: "resolved" not in look((0, True), (5, True), (5.0 + n / 1000, False)),
    ),
    "operations: how long an alarm is not repeated": (
        3_599_999,
        lambda n, *_: len(look((0, True), (5, True), (5 + n / 1000, True))) == 1,
    ),
    "operations: how long an event is not repeated": (
        3_599_999,
        lambda n, *paths: not sends_event_again(n, *paths),
    ),
    "operations: the loss of a day below 10 %": (999, stays_unlimited),
    "operations: how long a jump of the clock is reported": (44_999, reports_jump),
    "agents: characters of arguments": (
        20_000,
        lambda n, *_: not isinstance(decode(ToolRequest("c", "holding", '{"reason":"x"}'.ljust(n))), BadCall),
    ),
    "agents: the depth of JSON": (400, lambda n, *_: is_value(partial(storable, orjson.loads(nested(n))))),
    "agents: calls of an answer": (16, lambda n, *_: answers(n)),
    "agents: calls that are read from a text": (17, reads_calls),
    "agents: JSON in JSON in which a secret is found": (3, hides),
    "agents: characters of a response": (20_000, records_response),
    "agents: characters of the name that a model gives": (200, records_name),
    "agents: bytes of an invocation's answers": (100, lambda n, *_: shows_answers([n], 100, 1000)),
    "agents: bytes of all answers": (40, lambda n, *_: shows_answers([60, n], 100, 100)),
    "agents: characters of a line": (60, lambda n, *_: shortened("x" * n, LINE_MAX) == "x" * n),
    "agents: failures that are no warning": (2, is_silent),
    "agents: slots of a model's name": (2, gives_slots),
    "agents: rest of a limited key": (29_999, lambda n, *_: rests(RATE_LIMITED, n)),
    "agents: second rest of a limited key": (59_999, lambda n, *_: rests(RATE_LIMITED, n, 2)),
    "agents: longest rest of a limited key": (599_999, lambda n, *_: rests(RATE_LIMITED, n, 9)),
    "agents: longest rest of a refused key": (3_599_999, lambda n, *_: rests(KEY_REFUSED, n, 9)),
    "agents: time between probes of an empty account": (59_999, lambda n, *_: rests(OUT_OF_CREDIT, n)),
    "market: orders that wait for a price": (3, lets_wait),
    "market: how long an order waits for a price": (5000, waits_for_price),
    "market: candles of a read": (1000, keeps_candles),
    "market: ticks that are remembered": (64, keeps_ticks),
    "market: the age of a price": (30_000, lambda n, *_: untimely(START, START + n * MS) is None),
    "market: a price from the future": (30_000, lambda n, *_: untimely(START + n * MS, START) is None),
    "exchange: jumps ahead whose dates are known": (8, keeps_first_span),
    "exchange: the notional of an order": (10, lambda n, *_: is_sized(D(n) * 10, NOTIONAL_MAX / 100)),
    "exchange: postings that are no measure": (2, lambda n, *_: not is_slow([3.0] * n)),
    "exchange: how long postings count": (60, lambda n, *_: is_slow([2.5, 2.5, 2.5], n - 5.0)),
    "exchange: how long a posting may take": (2, lambda n, *_: not is_slow([float(n)] * 3)),
    "exchange: postings of a statement": (64, writes_at_once),
    "seasons: strange files that are named": (100, names_entries),
    "api: disagreements of a comparison": (200, shows_disagreements),
    "api: cached answers": (3, lambda n, *_: caches([1] * n)),
    "api: bytes of a cached answer": (100, lambda n, *_: caches([n])),
    "api: bytes of all cached answers": (40, lambda n, *_: caches([60, n])),
    "api: bytes of bodies on their way": (16 * 2**20, receives),
    "api: calls of a batch": (
        10,
        lambda n, *_: is_value(partial(batch.parse, orjson.dumps([{"url": "http://here/api/rpc/a"}] * n))),
    ),
    "api: readers of a stream": (3, lambda n, *_: has_place(n, known=False)),
    "api: readers of a stream with keys": (3, lambda n, *_: has_place(n, known=True)),
    "api: events that wait for a turn of the loop": (255, gathers),
    "api: bytes that wait for a reader": (100, queues_events),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
async def test_a_limit_accepts_as_much_as_it_says_and_no_more(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await outcomes(*LIMITS[name], monkeypatch, tmp_path) == [True, False]
