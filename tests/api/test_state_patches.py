"""A patch makes the new state of the old one, whatever has changed."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from trader.api.state_patches import encode_patch, revalue

figures = st.none() | st.integers(-3, 3) | st.sampled_from(["0.1", "0.2"])
positions = st.fixed_dictionaries(
    {"id": st.sampled_from("abcd"), "stop": figures}, optional={"leverage": figures, "tools": st.lists(figures)}
)
entries = st.fixed_dictionaries(
    {"modelId": st.sampled_from("mnop"), "plan": st.none() | st.just({"stop": 1}) | st.just({"stop": 2, "target": 1})},
    optional={"positions": st.lists(positions, max_size=4)},
)
states = st.lists(entries, max_size=4) | st.fixed_dictionaries(
    {"at": figures, "snapshots": st.lists(entries, max_size=4)}
)


def patch_of(paths: list[list[str]], values: list[Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        part = patch
        for key in path[:-1]:
            part = part.setdefault(key, {})
        part[path[-1]] = value
    return patch


def applied(state: Any, patch: Any) -> Any:
    """What `applyPatch` of `events.js` does."""
    if not isinstance(patch, dict):
        return patch
    if marks := patch.pop("@", None):
        revalue(state, marks)
    for key in patch.pop("-", []):
        del state[key]
    for index, item in patch.pop("+", []):
        state.insert(index, item)
    for paths, rows in patch.pop("=", []):
        patch |= {str(index): patch_of(paths, values) for index, *values in rows}
    for key, change in patch.items():
        place: Any = int(key) if isinstance(state, list) else key
        old = state[place] if isinstance(state, list) else state.get(place)
        state[place] = applied(old, change) if isinstance(change, dict) and isinstance(old, dict | list) else change
    return state


@given(states, states)
def test_a_patch_makes_the_new_state_of_the_old_one(old: Any, new: Any) -> None:
    if isinstance(old, dict) is not isinstance(new, dict):
        return
    before, after = msgspec.json.encode(old), msgspec.json.encode(new)
    patch = msgspec.json.decode(encode_patch(before, after))
    assert applied(msgspec.json.decode(before), patch) == msgspec.json.decode(after)
    if before == after:
        assert patch == {}


def test_a_patch_holds_only_what_has_changed() -> None:
    old = [{"modelId": "a", "cash": 1, "positions": [{"id": "p", "pnl": "1", "entry": "9"}, {"id": "q", "pnl": "2"}]}]
    new = [{"modelId": "a", "cash": 1, "positions": [{"id": "o", "pnl": "0"}, {"id": "p", "pnl": "3", "entry": "9"}]}]
    patch = encode_patch(msgspec.json.encode(old), msgspec.json.encode(new))
    assert msgspec.json.decode(patch) == {
        "0": {"positions": {"-": [1], "+": [[0, {"id": "o", "pnl": "0"}]], "1": {"pnl": "3"}}}
    }


def test_items_that_change_alike_share_the_names_of_what_has_changed() -> None:
    def state(*figures: int) -> bytes:
        return msgspec.json.encode(
            [{"modelId": str(i), "cash": f, "positions": [{"id": "p", "pnl": f}]} for i, f in enumerate(figures)]
        )

    patch = msgspec.json.decode(encode_patch(state(1, 2, 3, 4), state(5, 2, 6, 7)))
    assert list(patch) == ["="]
    [[paths, rows]] = patch["="]
    assert paths == [["cash"], ["positions", "0", "pnl"]]
    assert sorted(rows) == [[0, 5, 5], [2, 6, 6], [3, 7, 7]]


def test_of_positions_that_only_moved_with_their_marks_a_patch_has_the_marks() -> None:
    def state(mark: str, notional: str, gain: str, total: float, cash: float, *more: dict[str, Any]) -> bytes:
        held = {"id": "p", "symbol": "BTC", "side": "SHORT", "quantity": "0.25", "currentPrice": mark}
        positions = [{**held, "notional": notional, "unrealizedPnl": gain}, *more]
        entry = {"modelId": "a", "positions": positions, "totalUnrealizedPnl": total, "availableCash": cash}
        return msgspec.json.encode([entry])

    old = state("100.1", "25.025", "-0.025", -0.025, 900.5)
    new = state("99.9", "24.975", "0.025", 0.025, 900.55)
    assert msgspec.json.decode(encode_patch(old, new)) == {"@": {"BTC": "99.9"}}
    assert msgspec.json.decode(encode_patch(old, old)) == {}
    added = {"id": "q", "symbol": "ETH", "currentPrice": "5"}
    opened = state("99.9", "24.975", "0.025", 0.025, 850, added)
    assert msgspec.json.decode(encode_patch(old, opened)) == {
        "@": {"BTC": "99.9"},
        "0": {"positions": {"+": [[1, added]]}, "availableCash": 850},
    }
