import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import turns, until

from trader.api.broadcast import Broadcaster, EventBroadcaster, EventRing
from trader.api.state_broadcast import StateBroadcaster, StateOptions
from trader.api.stream_messages import PLAIN, EventsMessage, Message, MessageForm, NumberedEvent, StateMessage, frame
from trader.api.subscriber import Subscriber
from trader.core.errors import Unavailable


class Source:
    """A state that the test sets, whose loads the test lets through one by one when `held`."""

    def __init__(self) -> None:
        self.state = 0
        self.loads = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = asyncio.Event()

    async def __call__(self) -> bytes:
        self.loads += 1
        state = self.state
        self.began.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return str(state).encode()


@asynccontextmanager
async def running(
    source: Source, last_id: Callable[[], str] = str, **options: float
) -> AsyncIterator[StateBroadcaster]:
    spacings = StateOptions(**{"spacing_s": 0, **options})  # type: ignore[arg-type]
    broadcaster = StateBroadcaster("positions", source, last_id, spacings)
    await broadcaster.start()
    try:
        yield broadcaster
    finally:
        await broadcaster.close()


HELLO = frame(b"hello", "connected")


def state(number: int) -> Message:
    return StateMessage("positions", b"%d" % number)


def event(text: bytes) -> Message:
    return EventsMessage([NumberedEvent("step", text, "1")])


def shown(*texts: bytes) -> bytes:
    """The events as received by a subscriber."""
    return b"".join(frame(text, "step") for text in texts)


def events_broadcaster() -> EventBroadcaster:
    return EventBroadcaster("workflow", EventRing(lambda _: b"hello"))


def join(broadcaster: Broadcaster, backlog_bytes_max: int = 1000, form: MessageForm = PLAIN) -> Subscriber:
    subscriber = Subscriber(form, backlog_bytes_max)
    broadcaster.add(subscriber)
    return subscriber


async def taken(subscriber: Subscriber) -> bytes:
    await subscriber.wait(5)
    return subscriber.take()


@given(st.lists(st.sampled_from("abc"), min_size=20, max_size=60), st.integers(1, 6))
def test_addresses_displace_each_other_only_until_they_have_equal_shares(arrivals: list[str], capacity: int) -> None:
    broadcaster, accepted = Broadcaster("trades", capacity=capacity), list[Subscriber]()
    for address in arrivals:
        newcomer = Subscriber(PLAIN, address=address)
        with suppress(Unavailable):
            broadcaster.add(newcomer)
            accepted.append(newcomer)
    assert len(broadcaster) == min(capacity, len(accepted))
    assert broadcaster.dropped == len(accepted) - len(broadcaster) <= capacity, "no reader is displaced again and again"
    for address in "abc":
        ended = [each.ended for each in accepted if each.address == address]
        assert ended == sorted(ended, reverse=True), "the oldest of an address gives way"


async def test_only_the_newest_state_is_kept() -> None:
    broadcaster = Broadcaster("positions")
    subscriber = join(broadcaster)
    for number in range(1000):
        broadcaster.send(state(number))
    assert subscriber.take() == b"data: 999\n\n"
    assert subscriber.take() == b""


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=30), st.integers(50, 600))
def test_a_backlog_is_complete_or_its_subscriber_is_dropped(messages: list[bytes], bytes_max: int) -> None:
    async def check() -> None:
        broadcaster = events_broadcaster()
        quick, slow = join(broadcaster, bytes_max), join(broadcaster, bytes_max)
        assert quick.take() == HELLO
        received = []
        for message in messages:
            broadcaster.post("step", message)
            broadcaster.flush()
            received.append(quick.take())
        assert received == [shown(message) for message in messages]
        assert not quick.ended
        if len(shown(*messages)) <= bytes_max:  # the first pending messages have room
            assert slow.take() == HELLO + shown(*messages)
        else:
            assert (slow.ended, slow.take(), slow.error) == (True, b"", None)
        assert broadcaster.dropped == (1 if slow.ended else 0)

    asyncio.run(check())


async def test_concurrent_events_are_sent_together_and_a_new_subscriber_gets_only_later_ones() -> None:
    broadcaster = events_broadcaster()
    subscriber = join(broadcaster, 100_000)
    assert subscriber.take() == HELLO
    broadcaster.post("step", b"a")
    broadcaster.post("step", b"b")
    assert subscriber.take() == b""
    newcomer = join(broadcaster)
    broadcaster.post("step", b"c")
    broadcaster.flush()
    assert subscriber.take() == shown(b"a", b"b", b"c")
    assert newcomer.take() == HELLO + shown(b"c")
    for _ in range(1000):
        broadcaster.post("step", b"x")
    flood = subscriber.take()
    assert len(flood) >= len(shown(b"x")) * 768  # a flood does not pile up either
    broadcaster.flush()
    assert flood + subscriber.take() == shown(*[b"x"] * 1000)
    await broadcaster.close()


lengths = st.sampled_from([0, 10, 500, 40_000])


@given(
    st.lists(st.tuples(st.sampled_from(["events", "state", "idle"]), lengths, st.booleans()), max_size=25),
    st.booleans(),
)
def test_compressed_and_plain_subscribers_read_the_same(messages: list[tuple[str, int, bool]], numbered: bool) -> None:
    async def check() -> None:
        plain, packed = (Subscriber(MessageForm(numbered, compressed), 10**9) for compressed in (False, True))
        texts = {subscriber: subscriber.take(before=b"retry: 1\n\n") for subscriber in (plain, packed)}
        for kind, length, is_behind in messages:
            text = b'{"modelId":"model","text":"%b"}' % (b"x" * length)
            message: Message = EventsMessage([NumberedEvent("step", text, "1")])
            if kind == "state":
                message = state_message = StateMessage("positions", text)
                await state_message.compress()
            for subscriber in (plain, packed):
                if kind != "idle":
                    assert subscriber.offer(message)
                if not is_behind:
                    texts[subscriber] += subscriber.take(after=b"event: ping\ndata:\n\n" if kind == "idle" else b"")
        for subscriber in (plain, packed):
            texts[subscriber] += subscriber.take()
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        assert unpacker.decompress(texts[packed]) == texts[plain]

    asyncio.run(check())


async def test_the_end_of_a_subscriber_frees_its_writer_and_sends_nothing_more() -> None:
    broadcaster = events_broadcaster()
    subscriber = join(broadcaster, 10)
    cuts: list[str] = []
    subscriber.cut = lambda: cuts.append("cut")
    broadcaster.send(event(b"more"))
    assert cuts == ["cut"]
    broadcaster.send(event(b"again"))
    await broadcaster.close()
    assert (cuts, subscriber.take()) == (["cut"], b"")
    with pytest.raises(Unavailable, match="shutting down"):
        join(broadcaster)


async def test_a_new_subscriber_gets_the_state_and_others_get_nothing() -> None:
    source = Source()
    async with running(source) as broadcaster:
        first = join(broadcaster)
        assert await taken(first) == b"data: 0\n\n"
        source.state = 1
        second = join(broadcaster)
        assert await taken(second) == b"data: 1\n\n"
        assert first.take() == b""
        assert source.loads == 2


async def test_fifty_new_subscribers_share_a_load() -> None:
    source = Source()
    async with running(source) as broadcaster:
        subscribers = [join(broadcaster) for _ in range(50)]
        assert {await taken(subscriber) for subscriber in subscribers} == {b"data: 0\n\n"}
        assert source.loads == 1


async def test_nothing_is_loaded_without_subscribers() -> None:
    source = Source()
    async with running(source) as broadcaster:
        broadcaster.changed()
        subscriber = join(broadcaster)
        await taken(subscriber)
        broadcaster.unsubscribe(subscriber)
        loads = source.loads
        for _ in range(5):
            broadcaster.changed()
            await turns(1)
        assert source.loads == loads == 1


async def test_a_burst_causes_one_load_and_its_last_state_arrives() -> None:
    source = Source()
    async with running(source) as broadcaster:
        subscriber = join(broadcaster)
        await taken(subscriber)
        source.gate.clear()
        source.began.clear()
        broadcaster.changed()
        await source.began.wait()
        for state in range(1, 101):
            source.state = state
            broadcaster.changed()
        source.gate.set()
        assert await taken(subscriber) == b"data: 0\n\n"  # loaded before the burst
        assert await taken(subscriber) == b"data: 100\n\n"
        assert source.loads == 3


async def test_a_state_loaded_before_a_newcomer_is_not_its_first() -> None:
    source = Source()
    async with running(source) as broadcaster:
        first = join(broadcaster)
        await taken(first)
        source.gate.clear()
        source.began.clear()
        broadcaster.changed()
        await source.began.wait()
        source.state = 1
        newcomer = join(broadcaster)
        source.gate.set()
        assert await taken(newcomer) == b"data: 1\n\n"


async def test_new_subscribers_do_not_delay_common_messages() -> None:
    source = Source()
    async with running(source, spacing_s=3600) as broadcaster:
        subscriber = join(broadcaster)
        assert await taken(subscriber) == b"data: 0\n\n"
        source.state = 1
        broadcaster.changed()
        assert await taken(subscriber) == b"data: 1\n\n"
        newcomer = join(broadcaster)
        broadcaster.changed()
        await turns(100)
        assert (source.loads, subscriber.take(), newcomer.take()) == (2, b"", b"")


async def test_only_the_combined_stream_is_paced_by_the_length_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.api.state_broadcast.NUMBERED_BYTES_PER_S", 1 / 3600)
    monkeypatch.setattr("trader.api.state_broadcast.NUMBERED_SPACING_MAX_S", 3600)
    source = Source()
    async with running(source) as broadcaster:
        plain, numbered = join(broadcaster), join(broadcaster, form=MessageForm(numbered=True))
        assert (await taken(plain), await taken(numbered)) == (b"data: 0\n\n", b"id: \nevent: positions\ndata: 0\n\n")
        for state in (1, 2):
            source.state = state
            broadcaster.changed()
            assert await taken(plain) == b"data: %d\n\n" % state
        assert numbered.take() == b"id: \nevent: positions\ndata: 1\n\n"
        newcomer = join(broadcaster, form=MessageForm(numbered=True))
        assert await taken(newcomer) == b"id: \nevent: positions\ndata: 2\n\n"
        assert numbered.take() == b""


async def test_the_last_state_arrives_when_its_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.api.state_broadcast.NUMBERED_BYTES_PER_S", 20)
    source = Source()
    async with running(source) as broadcaster:
        numbered = join(broadcaster, form=MessageForm(numbered=True))
        began = asyncio.get_running_loop().time()
        await taken(numbered)
        for state in range(1, 101):
            source.state = state
            broadcaster.changed()
            await turns(1)
        while not (await taken(numbered)).endswith(b"data: 100\n\n"):
            pass
        elapsed_s = asyncio.get_running_loop().time() - began
        assert source.loads <= elapsed_s / 0.05 + 2


async def test_loads_stay_few_with_any_number_of_subscribers_and_events() -> None:
    source = Source()
    loop = asyncio.get_running_loop()
    async with running(source, spacing_s=0.05) as broadcaster:
        began_s = loop.time()
        while (elapsed_s := loop.time() - began_s) < 0.4:
            newcomers = [join(broadcaster) for _ in range(5)]
            broadcaster.changed()
            await turns(1)
            for newcomer in newcomers:
                broadcaster.unsubscribe(newcomer)
        assert 2 <= source.loads <= 2 * (elapsed_s / 0.05 + 1)
        assert await taken(join(broadcaster)) == b"data: 0\n\n"


async def test_an_unavailable_state_ends_only_new_subscribers_and_is_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trader.api.state_broadcast.RETRY_S", 0.01)
    source = Source()
    async with running(source) as broadcaster:
        subscriber = join(broadcaster)
        await taken(subscriber)
        source.error = Unavailable("the database is away")
        newcomer = join(broadcaster)
        assert await taken(newcomer) == b""
        assert newcomer.ended
        assert newcomer.error is source.error
        source.state = 7
        broadcaster.changed()
        await until(lambda: broadcaster.failures == 3)
        source.error = None
        assert await taken(subscriber) == b"data: 7\n\n"
        assert not subscriber.ended
    assert "stream positions: load failed: the database is away" in caplog.text


async def test_a_bug_in_a_load_is_logged_and_the_next_event_is_served(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    async with running(source) as broadcaster:
        subscriber = join(broadcaster)
        await taken(subscriber)
        source.error = KeyError("BTC")
        broadcaster.changed()
        await until(lambda: broadcaster.failures)
        source.error = None
        broadcaster.changed()
        assert await taken(subscriber) == b"data: 0\n\n"
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None


async def test_a_bug_in_sending_a_state_is_logged_and_the_next_state_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    source, ids, form = Source(), {"last": "5f0c77d1-1"}, MessageForm(numbered=True)
    async with running(source, lambda: ids["last"]) as broadcaster:
        subscriber = join(broadcaster, form=form)
        assert b"data: 0" in await taken(subscriber)
        last = ids.pop("last")
        broadcaster.changed()
        await until(lambda: broadcaster.failures == 1)
        newcomer = join(broadcaster, form=form)
        await newcomer.wait(5)
        assert newcomer.ended
        assert isinstance(newcomer.error, KeyError)
        ids["last"], source.state = last, 3
        broadcaster.changed()
        assert b"data: 3" in await taken(subscriber)
        assert b"data: 3" in await taken(join(broadcaster, form=form))
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True, True]


async def test_records_whose_sending_failed_are_sent_with_the_next_state() -> None:
    records, ids = ["1"], {"last": "5f0c77d1-1"}

    async def load() -> bytes:
        return f"[{','.join(records)}]".encode()

    broadcaster = StateBroadcaster("trades", load, lambda: ids["last"], StateOptions(spacing_s=0, limit=3))
    await broadcaster.start()
    subscriber = join(broadcaster, form=MessageForm(numbered=True))
    assert b"data: [1]" in await taken(subscriber)
    last = ids.pop("last")
    records.insert(0, "2")
    broadcaster.changed()
    await until(lambda: broadcaster.failures == 1)
    ids["last"] = last
    broadcaster.changed()
    assert b"data: [2,1]" in await taken(subscriber)
    await broadcaster.close()


async def test_gathered_events_are_sent_before_a_new_sequence_begins() -> None:
    broadcaster = EventBroadcaster("workflow", EventRing(lambda name: name.encode()))
    subscriber = join(broadcaster, form=MessageForm(numbered=True))
    for text in (b"sent", b"gathered"):
        broadcaster.post("step", text)
        broadcaster.flush()
    broadcaster.restart()
    received = [line for line in subscriber.take().split(b"\n") if line.startswith(b"data: ")]
    assert received == [b"data: connected", b"data: sent", b"data: gathered", b"data: reset"]
    await broadcaster.close()


async def test_a_hanging_load_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.api.state_broadcast.LOAD_S", 0.02)
    source = Source()
    source.gate.clear()
    async with running(source) as broadcaster:
        newcomer = join(broadcaster)
        await newcomer.wait(5)
        assert isinstance(newcomer.error, Unavailable)
        source.gate.set()
        assert await taken(join(broadcaster)) == b"data: 0\n\n"


async def test_closing_ends_everyone_and_the_loading() -> None:
    source = Source()
    source.gate.clear()
    broadcaster = StateBroadcaster("trades", source)
    await broadcaster.start()
    subscriber = join(broadcaster)
    await source.began.wait()
    await broadcaster.close()
    await broadcaster.close()
    assert subscriber.ended
    assert subscriber.error is None
