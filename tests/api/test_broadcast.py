import asyncio
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.api.broadcast import Broadcaster, EventBroadcaster
from trader.api.state_broadcast import StateBroadcaster
from trader.api.stream_events import EventRing
from trader.api.stream_messages import EventsMessage, Message, MessageForm, NumberedEvent, StateMessage, frame
from trader.api.subscriber import Subscriber
from trader.errors import Unavailable


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
async def running(source: Source, **options: float) -> AsyncIterator[StateBroadcaster]:
    hub = StateBroadcaster("positions", source, **{"spacing_s": 0, **options})  # type: ignore[arg-type]
    await hub.start()
    try:
        yield hub
    finally:
        await hub.close()


HELLO = frame(b"hello", "connected")


def state(number: int) -> Message:
    return StateMessage("positions", b"%d" % number)


def event(text: bytes) -> Message:
    return EventsMessage([NumberedEvent("step", text, "1")])


def shown(*texts: bytes) -> bytes:
    """The events as a subscriber gets them."""
    return b"".join(frame(text, "step") for text in texts)


def events_hub() -> EventBroadcaster:
    return EventBroadcaster("workflow", EventRing(lambda _: b"hello"))


def join(hub: Broadcaster, backlog_bytes_max: int = 1000) -> Subscriber:
    subscriber = Subscriber(backlog_bytes_max=backlog_bytes_max)
    hub.add(subscriber)
    return subscriber


async def taken(subscriber: Subscriber) -> bytes:
    await subscriber.wait(5)
    return subscriber.take()


def test_frames_are_server_sent_events() -> None:
    assert frame(b"[]") == b"data: []\n\n"
    assert frame(b"{}", "batch:complete") == b"event: batch:complete\ndata: {}\n\n"


async def test_the_51st_subscriber_is_refused_until_one_leaves() -> None:
    hub = Broadcaster("trades")
    subscribers = [join(hub) for _ in range(50)]
    with pytest.raises(Unavailable, match="50 places") as refusal:
        join(hub)
    assert refusal.value.retry_after_s >= 1
    hub.unsubscribe(subscribers[7])
    hub.unsubscribe(subscribers[7])
    assert len(hub) == 49
    join(hub)


async def test_only_the_newest_state_is_kept() -> None:
    hub = Broadcaster("positions")
    subscriber = join(hub)
    for number in range(1000):
        hub.send(state(number))
    assert subscriber.take() == b"data: 999\n\n"
    assert subscriber.take() == b""


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=30), st.integers(50, 600))
def test_a_backlog_is_whole_or_its_subscriber_is_dropped(messages: list[bytes], bytes_max: int) -> None:
    async def check() -> None:
        hub = events_hub()
        quick, slow = join(hub, bytes_max), join(hub, bytes_max)
        assert quick.take() == HELLO
        received = []
        for message in messages:
            hub.post("step", message)
            hub.flush()
            received.append(quick.take())
        assert received == [shown(message) for message in messages]
        assert not quick.ended
        if len(shown(*messages)) <= bytes_max:  # what waits first has room
            assert slow.take() == HELLO + shown(*messages)
        else:
            assert (slow.ended, slow.take(), slow.error) == (True, b"", None)
        assert hub.dropped == (1 if slow.ended else 0)

    asyncio.run(check())


async def test_what_happens_at_once_is_sent_at_once_and_a_newcomer_gets_only_what_follows() -> None:
    hub = events_hub()
    subscriber = join(hub, 100_000)
    assert subscriber.take() == HELLO
    hub.post("step", b"a")
    hub.post("step", b"b")
    assert subscriber.take() == b""
    newcomer = join(hub)
    hub.post("step", b"c")
    await asyncio.sleep(0)
    assert subscriber.take() == shown(b"a", b"b", b"c")
    assert newcomer.take() == HELLO + shown(b"c")
    for _ in range(1000):
        hub.post("step", b"x")
    flood = subscriber.take()
    assert len(flood) >= len(shown(b"x")) * 768  # a flood does not pile up either
    await asyncio.sleep(0)
    assert flood + subscriber.take() == shown(*[b"x"] * 1000)
    await hub.close()


lengths = st.sampled_from([0, 10, 500, 40_000])


@given(
    st.lists(st.tuples(st.sampled_from(["events", "state", "patch", "idle"]), lengths, st.booleans()), max_size=25),
    st.booleans(),
)
def test_what_a_compressed_subscriber_reads_is_what_a_plain_one_reads(
    messages: list[tuple[str, int, bool]], numbered: bool
) -> None:
    async def check() -> None:
        plain, packed = (Subscriber(MessageForm(numbered, compressed), 10**9) for compressed in (False, True))
        texts = {subscriber: subscriber.take(before=b"retry: 1\n\n") for subscriber in (plain, packed)}
        for kind, length, is_behind in messages:
            text = b'{"modelId":"model","text":"%b"}' % (b"x" * length)
            message: Message = EventsMessage([NumberedEvent("step", text, "1")])
            if kind in {"state", "patch"}:
                message = state_message = StateMessage("positions", text, is_patch=kind == "patch")
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


def test_what_was_sent_before_makes_the_next_message_short() -> None:
    subscriber = Subscriber(MessageForm(numbered=True, compressed=True))
    sizes = []
    for number in range(3):
        text = b'{"modelId":"apex-%d","invocationId":"515d70b1-8d51-57de-a28c-d85b6e8f74c6","step":1}' % number
        subscriber.offer(EventsMessage([NumberedEvent("workflow:step", text, f"1b5e026f-{number}")]))
        sizes.append(len(subscriber.take()))
    assert max(sizes[1:]) < sizes[0] / 4


async def test_the_end_of_a_subscriber_frees_its_writer_and_sends_nothing_more() -> None:
    hub = events_hub()
    subscriber = join(hub, 10)
    cuts: list[str] = []
    subscriber.cut = lambda: cuts.append("cut")
    hub.send(event(b"more"))
    assert cuts == ["cut"]
    hub.send(event(b"again"))
    await hub.close()
    assert (cuts, subscriber.take()) == (["cut"], b"")
    with pytest.raises(Unavailable, match="shutting down"):
        join(hub)


async def test_a_newcomer_gets_the_state_and_others_are_left_alone() -> None:
    source = Source()
    async with running(source) as hub:
        first = join(hub)
        assert await taken(first) == b"data: 0\n\n"
        source.state = 1
        second = join(hub)
        assert await taken(second) == b"data: 1\n\n"
        assert first.take() == b""
        assert source.loads == 2


async def test_fifty_newcomers_share_a_load() -> None:
    source = Source()
    async with running(source) as hub:
        subscribers = [join(hub) for _ in range(50)]
        assert {await taken(subscriber) for subscriber in subscribers} == {b"data: 0\n\n"}
        assert source.loads == 1


async def test_nothing_is_loaded_while_nobody_listens() -> None:
    source = Source()
    async with running(source) as hub:
        hub.changed()
        subscriber = join(hub)
        await taken(subscriber)
        hub.unsubscribe(subscriber)
        loads = source.loads
        for _ in range(5):
            hub.changed()
            await asyncio.sleep(0)
        assert source.loads == loads == 1


async def test_a_burst_is_one_load_and_its_last_state_arrives() -> None:
    source = Source()
    async with running(source) as hub:
        subscriber = join(hub)
        await taken(subscriber)
        source.gate.clear()
        source.began.clear()
        hub.changed()
        await source.began.wait()
        for state in range(1, 101):
            source.state = state
            hub.changed()
        source.gate.set()
        assert await taken(subscriber) == b"data: 0\n\n"  # loaded before the burst
        assert await taken(subscriber) == b"data: 100\n\n"
        assert source.loads == 3


async def test_a_state_loaded_before_a_newcomer_is_not_its_first() -> None:
    source = Source()
    async with running(source) as hub:
        first = join(hub)
        await taken(first)
        source.gate.clear()
        source.began.clear()
        hub.changed()
        await source.began.wait()
        source.state = 1
        newcomer = join(hub)
        source.gate.set()
        assert await taken(newcomer) == b"data: 1\n\n"


async def test_events_between_two_loads_share_the_next() -> None:
    source = Source()
    async with running(source, spacing_s=0.05) as hub:
        subscriber = join(hub)
        began = asyncio.get_running_loop().time()
        await taken(subscriber)
        while (elapsed_s := asyncio.get_running_loop().time() - began) < 0.2:
            hub.changed()
            await asyncio.sleep(0)
        assert 2 <= source.loads <= elapsed_s / 0.05 + 2


async def test_newcomers_do_not_hold_up_what_everyone_gets() -> None:
    source = Source()
    async with running(source, spacing_s=3600) as hub:
        subscriber = join(hub)
        assert await taken(subscriber) == b"data: 0\n\n"
        source.state = 1
        hub.changed()
        assert await taken(subscriber) == b"data: 1\n\n"
        newcomer = join(hub)
        hub.changed()
        for _ in range(100):
            await asyncio.sleep(0)
        assert (source.loads, subscriber.take(), newcomer.take()) == (2, b"", b"")


async def test_loads_stay_few_however_many_come_and_whatever_happens() -> None:
    source = Source()
    loop = asyncio.get_running_loop()
    async with running(source, spacing_s=0.05) as hub:
        began_s = loop.time()
        while (elapsed_s := loop.time() - began_s) < 0.4:
            newcomers = [join(hub) for _ in range(5)]
            hub.changed()
            await asyncio.sleep(0)
            for newcomer in newcomers:
                hub.unsubscribe(newcomer)
        assert 2 <= source.loads <= 2 * (elapsed_s / 0.05 + 1)
        assert await taken(join(hub)) == b"data: 0\n\n"


async def test_an_unavailable_state_ends_newcomers_only_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trader.api.state_broadcast.RETRY_S", 0.01)
    source = Source()
    async with running(source) as hub:
        subscriber = join(hub)
        await taken(subscriber)
        source.error = Unavailable("the database is away")
        newcomer = join(hub)
        assert await taken(newcomer) == b""
        assert newcomer.ended
        assert newcomer.error is source.error
        source.state = 7
        hub.changed()
        while hub.failures < 3:
            await asyncio.sleep(0)
        source.error = None
        assert await taken(subscriber) == b"data: 7\n\n"
        assert not subscriber.ended
    assert "stream positions: load failed: the database is away" in caplog.text


async def test_a_bug_in_a_load_is_logged_and_the_next_event_is_served(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    async with running(source) as hub:
        subscriber = join(hub)
        await taken(subscriber)
        source.error = KeyError("BTC")
        hub.changed()
        while not hub.failures:
            await asyncio.sleep(0)
        source.error = None
        hub.changed()
        assert await taken(subscriber) == b"data: 0\n\n"
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None


async def test_a_load_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.api.state_broadcast.LOAD_S", 0.02)
    source = Source()
    source.gate.clear()
    async with running(source) as hub:
        newcomer = join(hub)
        await newcomer.wait(5)
        assert isinstance(newcomer.error, Unavailable)
        source.gate.set()
        assert await taken(join(hub)) == b"data: 0\n\n"


async def test_closing_ends_everyone_and_the_loading() -> None:
    source = Source()
    source.gate.clear()
    hub = StateBroadcaster("trades", source, spacing_s=0)
    await hub.start()
    subscriber = join(hub)
    await source.began.wait()
    await hub.close()
    await hub.close()
    assert subscriber.ended
    assert subscriber.error is None
