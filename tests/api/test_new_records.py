"""A reader that merges new records into the first list has the list of the service, whatever has changed."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trader.api.state_broadcast import StateBroadcaster, StateOptions, new_records
from trader.api.stream_messages import MessageForm
from trader.api.subscriber import Subscriber

NAME = "trades"
LIMIT = 4


class Reader:
    """A client of the combined stream, which has forgotten nothing when it returns."""

    def __init__(self, broadcaster: StateBroadcaster) -> None:
        self._broadcaster = broadcaster
        self._subscriber: Subscriber | None = None
        self.records: dict[int, Any] = {}

    def take_turn(self) -> None:
        """Leave, or return."""
        if self._subscriber is None:
            self._subscriber = Subscriber(MessageForm(numbered=True))
            self._broadcaster.add(self._subscriber, "5f0c77d1-42")
        else:
            self._broadcaster.unsubscribe(self._subscriber)
            self._subscriber = None

    def read(self) -> None:
        text = b"" if self._subscriber is None else self._subscriber.take()
        for event in filter(None, text.decode().split("\n\n")):
            _, name, data = (line.partition(": ")[2] for line in event.split("\n"))
            records = {record["at"]: record for record in msgspec.json.decode(data)}
            assert records or name == NAME, "an event without new records"
            self.records = self.records | records if name == f"{NAME}:new" else records

    @property
    def is_connected(self) -> bool:
        return self._subscriber is not None


async def follow(steps: Sequence[tuple[str, int]]) -> None:
    """Let two readers read, leave and return while records come and go; in the end both know the latest."""
    kept = {at: {"at": at, "size": 1} for at in range(0, 12, 2)}

    def latest() -> list[Any]:
        return [kept[at] for at in sorted(kept, reverse=True)][:LIMIT]

    async def load() -> bytes:
        loaded = msgspec.json.encode(latest())
        await asyncio.sleep(0)
        return loaded

    broadcaster = StateBroadcaster(NAME, load, options=StateOptions(spacing_s=0, limit=LIMIT))
    await broadcaster.start()
    readers = [Reader(broadcaster) for _ in range(2)]
    readers[0].take_turn()
    for step, number in steps:
        match step:
            case "add" if number not in kept:
                kept[number] = {"at": number, "size": 1}
            case "change" if number in kept:
                kept[number] = {"at": number, "size": kept[number]["size"] + 1}
            case "remove":
                kept.pop(number, None)
            case "turn":
                readers[number % 2].take_turn()
            case "read":
                readers[number % 2].read()
        broadcaster.changed()
        for _ in range(number):
            await asyncio.sleep(0)
    for reader in readers:
        if not reader.is_connected:
            reader.take_turn()
    for _ in range(100):
        await asyncio.sleep(0)
    for reader in readers:
        reader.read()
        assert [reader.records[at] for at in sorted(reader.records, reverse=True)][:LIMIT] == latest()
    await broadcaster.close()


def versions(record: bytes) -> tuple[bytes, bytes]:
    """Return the name of a record and its version."""
    return record[:1], record[1:]


lists = st.dictionaries(st.integers(0, 6), st.sampled_from([1, 1, 1, 2]), min_size=1).map(
    lambda records: [b"%d.%d" % each for each in sorted(records.items(), reverse=True)][:LIMIT]
)


@settings(max_examples=500)
@given(lists, lists)
def test_new_records_make_the_new_list_of_the_old_one(old: list[bytes], new: list[bytes]) -> None:
    if (added := new_records(old, new, LIMIT)) is not None:
        merged = dict(map(versions, old)) | dict(map(versions, added))
        assert sorted(merged.items(), reverse=True)[:LIMIT] == list(map(versions, new))


def test_only_new_records_are_sent_again() -> None:
    assert new_records([b"3", b"2", b"1"], [b"5", b"3", b"2"], 3) == [b"5"]
    assert new_records([b"4", b"2"], [b"4", b"3", b"2"], 3) == [b"3"]
    assert new_records([b"2", b"1"], [b"2", b"1"], 3) == []
    assert new_records([], [b"1"], 3) is None


STEPS = st.sampled_from(["add", "add", "add", "change", "remove", "turn", "read"])


@given(st.lists(st.tuples(STEPS, st.integers(0, 14)), min_size=10, max_size=40))
def test_readers_have_the_latest_records_whenever_they_leave_and_return(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trader.api.state_broadcast.NUMBERED_BYTES_PER_S", 10**12)
        asyncio.run(follow(steps))
