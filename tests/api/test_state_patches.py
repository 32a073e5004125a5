"""A merge patch turns the keyed form of the old state into the keyed form of the new one, whatever has changed."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.api.state_broadcast import StateBroadcaster, StateOptions, encode_keyed, encode_patch
from trader.api.stream_messages import MessageForm
from trader.api.subscriber import Subscriber

figures = st.none() | st.integers(-3, 3) | st.sampled_from(["0.1", "0.2"])
positions = st.fixed_dictionaries(
    {"id": st.sampled_from("abcd"), "symbol": st.sampled_from(["BTC", "ETH"]), "stop": figures},
    optional={"leverage": figures, "tools": st.lists(figures)},
)
entries = st.fixed_dictionaries(
    {"modelId": st.sampled_from("mnop"), "plan": st.none() | st.just({"stop": 1}) | st.just({"stop": 2, "target": 1})},
    optional={"positions": st.lists(positions, max_size=4)},
)
states = st.lists(entries, max_size=4) | st.fixed_dictionaries(
    {"at": figures, "snapshots": st.lists(entries, max_size=4)}
)


def merged(target: Any, patch: Any) -> Any:
    """`MergePatch` of RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = merged(target.get(name), value)
    return target


def listed(value: Any) -> Any:
    """Return a state from its keyed form."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"ids", "items"}:
        return [listed(value["items"][key]) for key in value["ids"]]
    return {name: listed(member) for name, member in value.items()}


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(member) for name, member in value.items() if member is not None}
    return value


def keyed(state: Any) -> bytes:
    return encode_keyed(msgspec.json.encode(state))


def patch_of(old: Any, new: Any) -> Any:
    return msgspec.json.decode(encode_patch(keyed(old), keyed(new)))


@given(states, states)
def test_a_patch_turns_the_old_state_into_the_new_one(old: Any, new: Any) -> None:
    before, patch = msgspec.json.decode(keyed(old)), patch_of(old, new)
    after = merged(before, patch)
    assert after == msgspec.json.decode(keyed(new))
    assert without_nulls(listed(after)) == without_nulls(new)
    if isinstance(before, dict) and before == after:
        assert patch == {}


def test_a_patch_contains_only_changes() -> None:
    old = [{"modelId": "a", "cash": 1, "positions": [{"id": "p", "pnl": "1", "entry": "9"}, {"id": "q", "pnl": "2"}]}]
    new = [{"modelId": "a", "cash": 1, "positions": [{"id": "o", "pnl": "0"}, {"id": "p", "pnl": "3", "entry": "9"}]}]
    items = {"p": {"pnl": "3"}, "o": {"id": "o", "pnl": "0"}, "q": None}
    assert patch_of(old, new) == {"items": {"a": {"positions": {"ids": ["o", "p"], "items": items}}}}


def test_positions_of_a_model_are_keyed_by_their_short_symbols() -> None:
    def state(mark: str) -> list[dict[str, Any]]:
        held = [{"id": name, "symbol": symbol, "mark": mark} for name, symbol in (("p", "BTC"), ("q", "ETH"))]
        return [{"modelId": "a", "positions": held}]

    items = {"BTC": {"mark": "2"}, "ETH": {"mark": "2"}}
    assert patch_of(state("1"), state("2")) == {"items": {"a": {"positions": {"items": items}}}}


def test_a_list_whose_items_have_no_distinct_ids_is_replaced() -> None:
    for new in ([{"id": "a"}, {"id": "b"}, 1], [{"id": []}, {"id": "b"}], [{"id": 1}, {"id": 2}]):
        assert patch_of([{"id": "a"}, {"id": "a"}], new) == new


def test_named_amounts_are_numbers_rounded_to_cents() -> None:
    state = [{"modelId": "a", "cash": 9495.785, "pnl": None, "positions": [{"symbol": "BTC", "pnl": "-1.6579"}]}]
    entry = msgspec.json.decode(encode_keyed(msgspec.json.encode(state), ("cash", "pnl")))["items"]["a"]
    positions = {"ids": ["BTC"], "items": {"BTC": {"symbol": "BTC", "pnl": -1.66}}}
    assert entry == {"modelId": "a", "cash": 9495.78, "positions": positions}


class PatchedReader:
    """A client that merges patches. When it returns, it resumes with what it knew."""

    def __init__(self, broadcaster: StateBroadcaster) -> None:
        self._broadcaster = broadcaster
        self._subscriber: Subscriber | None = None
        self.state: Any = None

    def take_turn(self) -> None:
        """Leave, or return."""
        if self._subscriber is None:
            self._subscriber = Subscriber(MessageForm(numbered=True, patched=True))
            self._broadcaster.add(self._subscriber, "5f0c77d1-42")
        else:
            self._broadcaster.unsubscribe(self._subscriber)
            self._subscriber = None

    def read(self) -> None:
        text = b"" if self._subscriber is None else self._subscriber.take()
        for event in filter(None, text.decode().split("\n\n")):
            _, name, data = (line.partition(": ")[2] for line in event.split("\n"))
            value = msgspec.json.decode(data)
            self.state = merged(self.state, value) if name.endswith(":patch") else value

    @property
    def is_connected(self) -> bool:
        return self._subscriber is not None


async def follow(steps: Sequence[tuple[str, int, Any]]) -> None:
    """Let two readers read, leave and return while the state changes; in the end both know it."""
    state: Any = []

    async def load() -> bytes:
        loaded = msgspec.json.encode(state)
        await asyncio.sleep(0)
        return loaded

    broadcaster = StateBroadcaster("trades", load, options=StateOptions(spacing_s=0, patch_spacing_s=0))
    await broadcaster.start()
    readers = [PatchedReader(broadcaster) for _ in range(2)]
    for step, number, changed in steps:
        match step:
            case "change":
                state = changed
                broadcaster.changed()
            case "turn":
                readers[number % 2].take_turn()
            case "read":
                readers[number % 2].read()
        for _ in range(number):
            await asyncio.sleep(0)
    for reader in readers:
        if not reader.is_connected:
            reader.take_turn()
    for _ in range(100):
        await asyncio.sleep(0)
    for reader in readers:
        reader.read()
        assert reader.state == msgspec.json.decode(keyed(state))
    await broadcaster.close()


async def at_once(work: Callable[..., Any], *args: object) -> Any:
    await asyncio.sleep(0)
    return work(*args)


@given(st.lists(st.tuples(st.sampled_from(["change", "turn", "read"]), st.integers(0, 9), states), max_size=30))
def test_readers_of_patches_know_the_state_whenever_they_leave_and_return(steps: list[tuple[str, int, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:  # the work of threads becomes a turn of the event loop
        patch.setattr(asyncio, "to_thread", at_once)
        asyncio.run(follow(steps))
