"""A merge patch turns the keyed form of the old state into the keyed form of the new one, whatever has changed."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from trader.api.state_broadcast import encode_keyed, encode_patch

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
