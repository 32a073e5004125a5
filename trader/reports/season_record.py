"""Record in the bundle of a season: the chain until the result was made, and where the rows are not what it says.

Each line is a link of the chain: its record as text, or of an invocation the digest of its record as a JSON string.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

import msgspec

from trader.clock import iso
from trader.domain.agents.chain import GENESIS, Anchor, link_digest
from trader.domain.agents.entrants import canonical_json
from trader.domain.agents.results import Row
from trader.errors import SettingsError
from trader.reports.season_bundle import RECORD, Bundle
from trader.results import Table
from trader.store.agents.chain import select_links
from trader.store.database.pool import Connection

Cells = tuple[Any, ...]

_BATCH: Final = 500
_HOUR: Final = timedelta(hours=1)


class Difference(NamedTuple):
    """A field or row that is not what it should be; None is absent, or null."""

    field: str
    written: Any
    computed: Any


class RecordComparison(NamedTuple):
    """What contradicts the record, and how many rows of each table are in no record: they are older or newer."""

    differences: Sequence[Difference]
    unrecorded: Mapping[str, int]


class _Form(NamedTuple):
    """Places of the columns that the record has too, of those that name a row, of the account, and of the time.

    `is_whole`: a recorded row has to be in the table.
    """

    columns: Sequence[int]
    key: Sequence[int]
    account: int
    time: int
    is_whole: bool


_FORMS: Final[Mapping[str, _Form]] = {
    "fills": _Form(range(9), range(9), 1, 0, True),
    "hours": _Form(range(5), (0, 1), 0, 1, True),
    "runs": _Form((0, 1, 4, 5), (0, 1), 0, 5, False),
    "entrants": _Form((0, 1, 2, 3), (0, 1), 0, 3, False),
}


class _Recorded(NamedTuple):
    """Rows of the records by table, and the accounts that have results from before the first record."""

    rows: Mapping[str, Sequence[Row]]
    before: frozenset[str]


async def read_record(conn: Connection) -> list[str]:
    """Return the lines of the whole chain."""
    lines: list[str] = []
    while links := await select_links(conn, len(lines), _BATCH):
        lines += [link.record or f'"{link.record_digest.hex()}"' for link in links]
    return lines


def compare_record(bundle: Bundle, anchors: Iterable[Anchor] = ()) -> RecordComparison:
    """Compare the chain with the head of the record and with anchors, and the rows with the records.

    :raises SettingsError: a line is no link of the chain
    """
    differences: list[Difference] = []
    unrecorded: dict[str, int] = {}
    try:
        differences += _head_differences(bundle, anchors)
        recorded = _recorded(bundle.record)
        differences += _season_differences(bundle, recorded)
        tables = _tables(bundle, recorded)
    except (msgspec.MsgspecError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise SettingsError([f"{RECORD} has a line that is no link of the record: {error!r}"]) from None
    complete = {account: hour + _HOUR for account, hour, *_ in tables["hours"].rows()}  # in the order of time
    for name, form in _FORMS.items():
        until = complete if name == "fills" else {}
        compared = list(_row_differences(bundle.tables[name], tables[name], form, recorded.before, until))
        differences += [each for each in compared if each is not None]
        unrecorded[name] = compared.count(None)
    return RecordComparison(differences, unrecorded)


def _head_differences(bundle: Bundle, anchors: Iterable[Anchor]) -> Iterator[Difference]:
    anchored = {anchor.position: anchor.digest.hex() for anchor in anchors}
    digest, position = GENESIS, 0
    for position, line in enumerate(bundle.record, 1):
        own = bytes.fromhex(line[1:-1]) if line.startswith('"') else hashlib.sha256(line.encode()).digest()
        digest = link_digest(digest, own)
        if (known := anchored.get(position, digest.hex())) != digest.hex():
            yield Difference(f"anchor at position {position}", known, digest.hex())
    head = bundle.facts.record
    written = (0, GENESIS.hex()) if head is None else (head.position, head.digest)
    if written != (position, digest.hex()):
        yield Difference("season.record", written, (position, digest.hex()))


def _recorded(lines: Iterable[str]) -> _Recorded:
    rows: dict[str, list[Row]] = defaultdict(list)
    before: set[str] = set()
    for line in lines:
        if line.startswith('"'):
            continue
        content = msgspec.json.decode(line, type=dict[str, Any])
        before.update(mark["account_id"] for mark in content.get("before", ()))
        for table, listed in content.get("rows", {}).items():
            rows[table] += listed
    return _Recorded(rows, frozenset(before))


def _season_differences(bundle: Bundle, recorded: _Recorded) -> Iterator[Difference]:
    """Yield the records of the season that are others in the chain; the last one, of its closing, is made after it."""
    texts = {(row["season"], row["number"]): row["record"] for row in recorded.rows.get("season_records", ())}
    for number, record in enumerate(bundle.facts.records):
        known = texts.get((record["season"], record.get("number", 0)))
        if known != canonical_json(record).decode() and (known is not None or record["step"] != "closed"):
            yield Difference(f"season.records[{number}]", record, known)


def _tables(bundle: Bundle, recorded: _Recorded) -> dict[str, Table]:
    """Return the rows that a bundle of these records has, in the form of its tables."""
    tables = {name: Table(name) for name in _FORMS}
    runs = list(bundle.tables["runs"].rows())
    run_of = {account: run for account, run, *_ in runs}
    models = {account: at for account, _, is_baseline, _, _, at, _ in runs if not is_baseline}
    since, until = min(models.values(), default=bundle.facts.end), bundle.facts.end
    for row in recorded.rows.get("fills", ()):
        at, account = _moment(row["created_at"]), row["account_id"]
        if account in models and since <= at < until:
            fee = Decimal(row["fee"]) + Decimal(row["liquidation_fee"])
            order = (row["symbol"], row["side"], row["quantity"], row["price"], fee, row["maker"], row["cause"])
            tables["fills"].add(at, account, *order)
    for row in recorded.rows.get("portfolio_hourly", ()):
        hour, account = _moment(row["hour"]), row["account_id"]
        if run_of.get(account) == row["run_id"] and hour < until:
            tables["hours"].add(account, hour, row["last"], _moment(row["last_at"]), row["leverage"])
    states = {(row["account_id"], row["id"]): row for row in recorded.rows.get("runs", ())}
    states |= {(row["id"], row["run_id"]): row for row in recorded.rows.get("baselines", ())}
    for (account, run), row in states.items():
        tables["runs"].add(account, run, None, None, row["initial_capital"], _moment(row["started_at"]), None)
    for (account, number), row in {
        (row["model_id"], row["number"]): row for row in recorded.rows.get("entrants", ())
    }.items():
        tables["entrants"].add(account, number, row["fingerprint"], _moment(row["began_at"]), *[None] * 6)
    return tables


def _row_differences(
    written: Table, recorded: Table, form: _Form, before: frozenset[str], until: Mapping[str, datetime]
) -> Iterator[Difference | None]:
    """Yield what differs, and None for each row in no record. The records have all of an account `until` a time."""
    rows, known = _keyed(written, form), _keyed(recorded, form)
    times: dict[str, list[datetime]] = defaultdict(list)
    for row in known.values():
        times[row[form.account]].append(row[form.time])
    for key, row in rows.items():
        account, at = row[form.account], row[form.time]
        same, ends = known.get(key), [*times[account], *filter(None, [until.get(account)])]
        if same is not None:
            if any(row[place] != same[place] for place in form.columns):
                yield _difference(written.name, form, row, same)
        elif not ends or at >= max(ends) or (account in before and at <= min(ends)):
            yield None
        else:
            yield _difference(written.name, form, row, None)
    if form.is_whole:
        for key in known.keys() - rows.keys():
            yield _difference(written.name, form, None, known[key])


def _keyed(table: Table, form: _Form) -> dict[Cells, Cells]:
    """Return the rows by what names them; equal ones are numbered. An entrant that is not known has no time."""
    counts = Counter[Cells]()
    keyed: dict[Cells, Cells] = {}
    for row in table.rows():
        if row[form.time] is not None:
            key = tuple(row[place] for place in form.key)
            keyed[*key, counts[key]] = row
            counts[key] += 1
    return keyed


def _difference(name: str, form: _Form, written: Cells | None, recorded: Cells | None) -> Difference:
    row = written or recorded or ()
    cells = (None if each is None else [_plain(each[place]) for place in form.columns] for each in (written, recorded))
    return Difference(f"{name} {row[form.account]} {iso(row[form.time])}", *cells)


def _plain(cell: Any) -> Any:
    return iso(cell) if isinstance(cell, datetime) else cell


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
