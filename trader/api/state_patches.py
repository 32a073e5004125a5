"""Patches: what has changed between two states of a stream, as a JSON object that a client applies to the older one.

A patch of an object has the new value of each member that has changed; a patch of a list the same by index. A value
that is an object is itself a patch where the client has an object or a list, else the new value. Two keys are special,
and are applied before the others: `-` lists members to delete, or indices in descending order; `+` lists pairs of an
index and a new item, in ascending order. Items of a list are the same when they have the same `id`, else `modelId`.

Many items of a state that is a list, or of a list that is a member of it, change in the same way. They are written as
tables under `=`, so that the names are there once: pairs of the paths of what has changed, and rows of an index with
the value at each path.

Of positions most changes follow from a few marks: under `@` are those that have changed, by symbol. The client values
what it has at them, as `revalue` does, before it applies the rest of the patch, which holds what does not follow.
"""

from collections.abc import Iterator, Mapping
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, localcontext
from typing import Any, Final

import msgspec

from trader.domain.money import ZERO, format_decimal

_UNCHANGED: Any = object()

EXACT: Final = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""Decimal arithmetic without rounding, as that of a client with whole numbers of any size."""

PLAIN_MAX: Final = 10**15
"""Numbers from 1 to here are written without an exponent in Python and in JavaScript."""


def encode_patch(old: bytes, new: bytes) -> bytes:
    """Return the patch that makes the new state of the old one; both are the JSON text of an object or a list."""
    before, after = msgspec.json.decode(old), msgspec.json.decode(new)
    marks = _changed_marks(before, after)
    if marks:
        revalue(before, marks)
    patch = _change(before, after)
    if isinstance(after, dict) and isinstance(patch, dict):
        patch = {key: _tabulated(change, after.get(key)) for key, change in patch.items()}
    else:
        patch = _tabulated(patch, after)
    patch = {} if patch is _UNCHANGED else patch
    return msgspec.json.encode({"@": marks, **patch} if marks and isinstance(patch, dict) else patch)


def _changed_marks(before: Any, after: Any) -> dict[str, str]:
    """Return the new marks by symbol, as text, of the positions in two states; empty of other states."""
    marks_before, marks = (dict(_marks(state)) for state in (before, after))
    return {symbol: mark for symbol, mark in marks.items() if marks_before.get(symbol, mark) != mark}


def _marks(state: Any) -> Iterator[tuple[str, str]]:
    for entry in state if isinstance(state, list) else ():
        for position in entry.get("positions", ()) if isinstance(entry, dict) else ():
            if position.get("currentPrice") is not None:
                yield position["symbol"], position["currentPrice"]


def revalue(entries: list[dict[str, Any]], marks: Mapping[str, str]) -> None:
    """Value the positions of a state at new marks, and add what they have gained to the sums of their models, exactly.

    An availableCash that may be written with an exponent is left as it is.
    """
    with localcontext(EXACT):
        for entry in entries:
            positions = entry.get("positions", ())
            gain = sum((_revalue(position, marks) for position in positions), ZERO)
            if entry.get("totalUnrealizedPnl") is not None:
                total = sum((Decimal(position["unrealizedPnl"] or 0) for position in positions), ZERO)
                entry["totalUnrealizedPnl"] = float(total)
            if gain and 1 <= (entry.get("availableCash") or 0) < PLAIN_MAX:
                entry["availableCash"] = float(Decimal(repr(entry["availableCash"])) + gain)


def _revalue(position: dict[str, Any], marks: Mapping[str, str]) -> Decimal:
    """Value a position at its mark, and return what it has gained."""
    mark, last = marks.get(position["symbol"]), position["currentPrice"]
    if mark is None or last is None:
        return ZERO
    quantity = Decimal(position["quantity"])
    gain = quantity * (Decimal(mark) - Decimal(last)) * (1 if position["side"] == "LONG" else -1)
    position["currentPrice"] = mark
    position["notional"] = format_decimal(quantity * Decimal(mark))
    position["unrealizedPnl"] = format_decimal(Decimal(position["unrealizedPnl"]) + gain)
    return gain


def _tabulated(patch: Any, after: Any) -> Any:
    """Return the patch of a list with the items that have changed alike in tables; any other as it is."""
    if not (isinstance(patch, dict) and isinstance(after, list)):
        return patch
    tables: dict[tuple[tuple[str, ...], ...], list[list[Any]]] = {}
    for index, change in patch.items():
        if index not in {"-", "+"}:
            values = dict(_leaves(change))
            tables.setdefault(tuple(values), []).append([int(index), *values.values()])
    alike = [(paths, rows) for paths, rows in tables.items() if len(rows) > 1]
    tabulated = {str(row[0]) for _, rows in alike for row in rows}
    rest = {key: change for key, change in patch.items() if key not in tabulated}
    return {**rest, "=": alike} if alike else rest


def _leaves(patch: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path of each value of a patch that is no object with members, and the value."""
    if not isinstance(patch, dict) or not patch:
        yield path, patch
        return
    for key, value in patch.items():
        yield from _leaves(value, *path, key)


def _change(old: Any, new: Any) -> Any:
    """Return the patch between two values, or the new value where a patch cannot say it."""
    if old == new:
        return _UNCHANGED
    if isinstance(old, dict) and isinstance(new, dict):
        return _change_of_objects(old, new)
    if isinstance(old, list) and isinstance(new, list):
        return _change_of_lists(old, new)
    return new


def _change_of_objects(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    if gone := [key for key in old if key not in new]:
        patch["-"] = gone
    for key, value in new.items():
        change = _change(old[key], value) if key in old else value
        if change is not _UNCHANGED:
            patch[key] = change
    return patch


def _change_of_lists(old: list[Any], new: list[Any]) -> Any:
    items_before, items_after = _by_identity(old), _by_identity(new)
    if items_before is None or items_after is None:
        return new
    if [key for key in items_before if key in items_after] != [key for key in items_after if key in items_before]:
        return new  # their order has changed
    patch: dict[str, Any] = {}
    if gone := [index for index, key in enumerate(items_before) if key not in items_after]:
        patch["-"] = gone[::-1]
    if added := [[index, item] for index, (key, item) in enumerate(items_after.items()) if key not in items_before]:
        patch["+"] = added
    for index, (key, item) in enumerate(items_after.items()):
        if key in items_before and (change := _change(items_before[key], item)) is not _UNCHANGED:
            patch[str(index)] = change
    return patch


def _by_identity(items: list[Any]) -> dict[str, Any] | None:
    """Return the items by their identity; None when some have none, or the same."""
    items_by_key: dict[str, Any] = {}
    for item in items:
        key = item.get("id", item.get("modelId")) if isinstance(item, dict) else None
        if not isinstance(key, str) or key in items_by_key:
            return None
        items_by_key[key] = item
    return items_by_key
