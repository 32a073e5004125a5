"""Rows in bulk, by COPY: for a past that is written at once, not lived through.

The rows of bookings are the structs of `bookings`, whose fields are the columns of their tables in order.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from io import BytesIO
from typing import Any, Final

import msgspec

from trader.domain.exchange.orders import OrderAnswer
from trader.store.database.pool import Connection

BULK_TIMEOUT_S: Final = 600.0

SNAPSHOT_COLUMNS: Final = ("account_id", "run_id", "net_portfolio", "cash", "unrealized_pnl", "created_at")
INVOCATION_COLUMNS: Final = (
    "id", "model_id", "status", "failure_reason", "response", "step_count", "input_tokens", "output_tokens", "cost_usd",
    "started_at", "finished_at",
)  # fmt: skip


def copy_line(values: Iterable[object]) -> str:
    """A row in the text format of COPY. A struct or a dict is JSON, a list of texts an array."""
    return "\t".join([_WRITERS.get(type(value), str)(value) for value in values]) + "\n"


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\") if "\\" in value else value
    if escaped.isprintable():
        return escaped
    return escaped.replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode().replace("\\", "\\\\")  # JSON has no tabs and line ends of its own


def _array(values: list[str]) -> str:
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return _text("{" + ",".join(f'"{value}"' for value in quoted) + "}")


_WRITERS: Final[Mapping[type, Callable[[Any], str]]] = {
    type(None): lambda _: "\\N",
    str: _text,
    bool: lambda value: "t" if value else "f",
    datetime: datetime.isoformat,
    bytes: lambda value: "\\\\x" + value.hex(),
    list: _array,
    dict: _json,
    OrderAnswer: _json,
}
"""How the values of a row are written, by their exact type; numbers, ids and names as Python has them."""


async def copy_lines(conn: Connection, table: str, lines: Iterable[str], columns: Iterable[str] | None = None) -> None:
    """Append rows, each a `copy_line`, to a table."""
    data = "".join(lines).encode()
    if data:
        await conn.copy_to_table(
            table,
            source=BytesIO(data),
            columns=None if columns is None else list(columns),
            format="text",
            timeout=BULK_TIMEOUT_S,
        )


UPDATE_FRESH_ACCOUNT = """
UPDATE accounts SET sequence = $2, changed_at = $3, last_order_at = $4 WHERE id = $1 AND sequence = 1
"""


async def update_fresh_account(
    conn: Connection, account_id: str, sequence: int, changed_at: datetime, last_order_at: datetime | None
) -> bool:
    """Bring an account in which nothing was booked yet to the end of its past. False: something was."""
    done: str = await conn.execute(UPDATE_FRESH_ACCOUNT, account_id, sequence, changed_at, last_order_at)
    return done == "UPDATE 1"


# The sums of the hours are the rollup's own, so that this may be repeated at any time.
UPSERT_ALL_VARIANT_HOURS = """
INSERT INTO variant_hourly (hour, variant, total, count)
SELECT h.hour, m.variant, sum(h.total), sum(h.count)
FROM portfolio_hourly h JOIN models m ON m.id = h.account_id
GROUP BY h.hour, m.variant
ON CONFLICT (hour, variant) DO UPDATE SET total = excluded.total, count = excluded.count
"""


async def upsert_all_variant_hours(conn: Connection) -> None:
    """Make the hours of the variants anew from those of the accounts. No snapshots may be written meanwhile."""
    await conn.execute(UPSERT_ALL_VARIANT_HOURS, timeout=BULK_TIMEOUT_S)
