"""Time is an order: ticks and waits are decided by sequence and steady time, and dates only label.

Every comparison of dates that runs in a service is listed with what it is for. A new one is an interval
(`interval_elapsed`, which no clock that is set back delays), steady time, a number, or a line of this list.
"""

import ast
import re
from collections.abc import Iterator
from typing import Final

from support.trees import modules

EVENT_TIME: Final = {"backtest", "commands", "exam", "seasons"}
"""Rooms whose dates are all of a recording, or of what people wrote."""

DATE: Final = re.compile(r"(.*_)?(at|now|until|since|due|deadline)")

REVIEWED: Final[dict[str, tuple[str, int]]] = {
    "agents/budgets.py": ("whether a cadence is due on its grid; measured anew after a clock was set back", 1),
    "agents/built_view.py": ("which candles had closed at a date", 1),
    "agents/domain/entrants.py": ("a count", 1),
    "agents/domain/prompt.py": ("decisions since a date, for display", 1),
    "agents/domain/rules/common.py": ("candles since an exit; after a later date there are none to wait for", 1),
    "agents/domain/rules/sovereign.py": ("how long a position has been open, for a review", 2),
    "agents/observer.py": ("values of the day before, by their hours", 1),
    "agents/providers/confinement.py": ("steady time", 1),
    "agents/providers/keys.py": ("steady time", 1),
    "agents/providers/taapi.py": ("how long values are shown; a date ahead asks anew", 1),
    "agents/reproduction.py": ("recorded dates", 1),
    "api/dashboard/preview.py": ("which values are of the current run, for a picture", 1),
    "api/streams.py": ("steady time", 2),
    "core/clock.py": ("the waits of the clocks; an interval is over, too, once the clock is set back", 3),
    "core/schedulers.py": ("an interval; over, too, once the clock is set back", 1),
    "exchange/accounts.py": ("the text of a warning", 1),
    "exchange/domain/account.py": ("hours of funding; the recovery of depth, whose later dates a set clock drops", 5),
    "exchange/domain/account_update.py": ("whether the clock was set back behind the account's rows", 1),
    "exchange/domain/order_validation.py": ("an exit plan's own date", 1),
    "exchange/domain/tick_order.py": ("dates under which ticks were applied; how far a clock is behind at a start", 9),
    "exchange/domain/tick_rules.py": ("hours of funding, a market's end, a plan's own date, a book after its order", 8),
    "exchange/service_level.py": ("how many were refused in a window, for display", 1),
    "exchange/tick_processor.py": ("ticks of one dating: a jump first dates them anew", 10),
    "live/ladder.py": ("how old a certificate is, in days", 1),
    "live/domain/ledger.py": ("hours of funding, up to the venue's own", 2),
    "live/ledger.py": ("hours of funding, by the venue's clock", 3),
    "live/market.py": ("the age of a book; a clock set back reconnects", 4),
    "live/lighter/orders.py": ("the venue's expiry, and how long ago it executed, by its own dates", 3),
    "live/lighter/records.py": ("the venue's records, by its own dates", 3),
    "live/source.py": ("the venue's history, by its own dates", 3),
    "live/socket.py": ("silence of the connection; a clock set back reconnects", 1),
    "live/hyperliquid/account.py": ("the end of an agent, by the venue's clock, for a warning", 1),
    "live/hyperliquid/orders.py": ("the venue's expiry, by its own clock", 1),
    "live/hyperliquid/records.py": ("the venue's records, by its own dates", 1),
    "live/lighter/transactions.py": ("the venue's records, by its own dates", 1),
    "live/outbox.py": ("how long a closing order is sent again", 1),
    "live/recorded_books.py": ("books of one recording", 3),
    "live/rehearsals.py": ("how old a report is, in days", 1),
    "market/candles.py": ("minutes that are recorded; those of a clock that was ahead are read again", 1),
    "market/domain/indicators.py": ("counts of values", 3),
    "market/domain/markets.py": ("the age of a price, either way; the published dates of a market", 3),
    "market/feed.py": ("the first book after an order's latency; a clock set back moves the waits", 5),
    "market/sources/path.py": ("seconds of a simulated crash", 3),
    "market/sources/recorded.py": ("dates of a recording", 7),
    "market/sources/replay.py": ("seconds of a recording", 2),
    "portfolio/analytics.py": ("runs of an entrant, by their dates", 1),
    "portfolio/domain/behaviour.py": ("positions of a record", 5),
    "portfolio/domain/equity_audit.py": ("hours of a record", 1),
    "portfolio/domain/histories.py": ("how long raw snapshots are kept", 1),
    "portfolio/domain/returns.py": ("hours of a record", 1),
    "portfolio/domain/seasons.py": ("the published dates of a season", 7),
    "portfolio/hour_bounds.py": ("whether a run began within the hour", 1),
    "portfolio/run_statistics.py": ("hours of a record", 5),
    "portfolio/seasons.py": ("the published dates of a season", 6),
    "portfolio/snapshots.py": ("whether a snapshot is of the present hour; a date ahead takes one more", 2),
}
"""The modules that compare dates: what for, and how often."""


def named(node: ast.expr) -> str:
    """Return the name of a value, or of what it was computed from."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.BinOp(left=inner) | ast.Call(func=inner) | ast.Subscript(value=inner):
            return named(inner)
        case _:
            return ""


def compared(tree: ast.Module) -> Iterator[str]:
    """Yield the comparisons of a module in which one side is named like a date."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Compare)
            and any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
            and any(DATE.fullmatch(named(side)) for side in (node.left, *node.comparators))
        ):
            yield ast.unparse(node)


def is_listed(module: str) -> bool:
    """Return whether a module's dates are a clock's."""
    return module.split("/", maxsplit=1)[0] not in EVENT_TIME


def test_every_comparison_of_dates_in_a_service_is_reviewed() -> None:
    found = {module: each for module, tree in modules().items() if is_listed(module) and (each := list(compared(tree)))}
    changed = {module: each for module, each in found.items() if len(each) != REVIEWED.get(module, ("", 0))[1]}
    assert not changed, f"decide by sequence or steady time, or say in REVIEWED what the dates are for: {changed}"
    assert found.keys() == REVIEWED.keys()


def test_the_search_for_comparisons_finds_the_kinds_of_mistakes() -> None:
    mistakes = "if tick.at - since > STALE: pass\nif clock.now() >= self._due: pass\nx = accounts[0].seen_until < now"
    assert len(list(compared(ast.parse(mistakes)))) == 3
