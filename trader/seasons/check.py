"""Check of a published result: everything is derived again from its record, and nothing from the rest of the folder."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import msgspec

from trader.core.clock import iso
from trader.core.errors import SettingsError
from trader.core.files import decode_json, read_regular
from trader.core.money import format_decimal
from trader.portfolio.domain.seasons import (
    FIXED_AT_START,
    Season,
    SeasonRecord,
    SeasonResult,
    SeasonRules,
    changes,
    seed_digest,
)
from trader.portfolio.tables import Format, Table, load_table
from trader.record.domain.chain import Anchor, unmatched
from trader.seasons.bundle import (
    CARD,
    REPORT,
    SCHEMA,
    Basis,
    CardHead,
    CodeDigest,
    digest_files,
    list_bundle,
    read_lines,
)
from trader.seasons.card import Judged, is_decided, judge, make_card, write_files
from trader.seasons.record_reader import RecordReader, season_tables

_TOLERANCE: Final = 1e-9
"""Figures from two machines may differ in their last digits."""

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_NONCE: Final = re.compile(r"nonce(-|=\")[0-9a-f]{64}")


class FieldDifference(NamedTuple):
    """A field, row or link that differs from what the record says; None means absent or null."""

    field: str
    written: Any
    computed: Any


class DerivedResult(NamedTuple):
    """The season according to the record in a folder, and everything that contradicts it.

    Without a `judged` season the record does not belong to a result, or contradicts its anchors. `files` are the
    contents that the folder's report, schema and tables must have. `links` is the length of the record, and `anchored`
    the last position that an anchor covers (0: none).
    """

    judged: Judged | None
    result: SeasonResult | None
    files: Mapping[str, bytes]
    differences: Sequence[FieldDifference]
    links: int
    anchored: int


async def check_result(folder: Path, anchors: Iterable[Anchor] = ()) -> DerivedResult:
    """Derive the result of a season from the record in its folder again, and compare it with the folder's files.

    :raises SettingsError: the folder has missing or other files, or a file cannot be read
    """
    form = list_bundle(folder)
    derived = await derive_result(folder, form, anchors)
    return derived._replace(differences=[*derived.differences, *compare_files(folder, form, derived)])


async def derive_result(folder: Path, form: Format, anchors: Iterable[Anchor] = ()) -> DerivedResult:
    """Derive the result of a season from the record in its folder and nothing else.

    :raises SettingsError: the record cannot be read
    """
    known = {anchor.position: anchor for anchor in anchors}
    number, seed, result = _closing(folder)
    reader, digests, basis = RecordReader(), dict[int, bytes](), None
    for text in read_lines(folder):
        reader.read(text)
        if reader.position in known:
            digests[reader.position] = reader.digest
        if result is not None and reader.position == result.position:
            basis = _basis(reader, number, result)
    last = max(digests, default=0)
    wrong = [
        FieldDifference(f"anchor at position {anchor.position}", anchor.digest.hex(), digest and digest.hex())
        for anchor, digest in unmatched(known.values(), digests)
    ]
    if result is None:
        wrong.append(FieldDifference("record", "no closing of a season at its end", "the closing of a season"))
    elif basis is None:
        wrong.append(FieldDifference("season.result.position", result.position, reader.position))
    if wrong or basis is None or result is None:  # nothing that such a record says counts
        return DerivedResult(None, None, {}, wrong, reader.position, last)
    judged = await judge(basis)
    wrong += _closing_differences(reader, basis, result, seed, is_decided=is_decided(judged.report))
    return DerivedResult(judged, result, _written(judged, form), wrong, reader.position, last)


def _written(judged: Judged, form: Format) -> dict[str, bytes]:
    """Return the files of a season by name."""
    with TemporaryDirectory() as made:
        write_files(Path(made), judged, form)
        return {file.name: file.read_bytes() for file in Path(made).iterdir()}


def _closing(folder: Path) -> tuple[int, str | None, SeasonResult | None]:
    """Return the season, its published seed and its result, by the closing with which the record ends; no result if it
    ends otherwise."""
    last = ""
    for text in read_lines(folder):
        last = text
    try:
        (row,) = msgspec.json.decode(last, type=dict[str, Any])["rows"]["season_records"]
        record = msgspec.json.decode(row["record"], type=SeasonRecord)
    except (msgspec.MsgspecError, RecursionError, ValueError, LookupError, TypeError):
        return 0, None, None
    return record.season, record.seed, record.result if record.step == "closed" else None


def _basis(reader: RecordReader, number: int, result: SeasonResult) -> Basis:
    """Return what the result is made of, from the record up to its head.

    :raises SettingsError: the record says nothing of such a season
    """
    if not reader.seasons.get(number) or reader.seasons[number][0].rules is None:
        raise SettingsError([f"the record has no season {number} before position {result.position}"])
    season = reader.season(number)
    try:
        until = datetime.fromisoformat(result.until)
        tables = season_tables(reader, season, until)
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise SettingsError([f"the record of season {number} contradicts itself: {error!r}"]) from None
    head = CardHead(position=reader.position, digest=reader.digest.hex())
    return Basis(season, until, head, CodeDigest(version=result.version, digest=result.code), tables)


def _closing_differences(
    reader: RecordReader, basis: Basis, result: SeasonResult, seed: str | None, *, is_decided: bool
) -> Iterator[FieldDifference]:
    """Yield what the closing says otherwise than the records before it."""
    season, rules = basis.season, basis.season.rules
    if result.head != basis.head.digest:
        yield FieldDifference("season.result.head", result.head, basis.head.digest)
    if (records := reader.seasons[season.number][:-1]) != list(season.records):
        yield FieldDifference("season.records", len(season.records), len(records))
    yield from _late_differences(reader, season)
    if basis.facts.trading_mode != "live":  # whose venue may report a trade after a snapshot that includes it
        yield from _equity_differences(reader, basis)
    complete = reader.complete_until(rules)
    is_early = basis.until < rules.end and rules.stopping == "decided" and is_decided
    if not (basis.until == rules.end or is_early) or (complete is not None and complete < basis.until):
        yield FieldDifference("season.result.until", result.until, iso(min(filter(None, (rules.end, complete)))))
    if season.seed_digest is not None:
        published = None if seed is None else seed_digest(seed)
        if published != season.seed_digest:
            yield FieldDifference("SHA-256 of the published seed", published, season.seed_digest)


def _equity_differences(reader: RecordReader, basis: Basis) -> Iterator[FieldDifference]:
    """Yield the equities of accounts without a position that their fills and payments do not add up to."""
    for account in reader.models(basis.season.rules, basis.until):
        for run in reader.runs_of(account):
            for wrong in reader.equity_mismatches(account, run, basis.until):
                field = f"equity of {account} without a position at {iso(wrong.at)}"
                yield FieldDifference(field, format_decimal(wrong.equity), format_decimal(wrong.low))


def _late_differences(reader: RecordReader, season: Season) -> Iterator[FieldDifference]:
    """Yield what was opened or amended after the season had begun by the decisions and hours in the record."""
    before: SeasonRules | None = None
    for record in season.records:
        if record.rules is None:
            continue
        field, is_late = f"season.records[{record.number}]", (season.number, record.number) in reader.late
        if is_late and not record.after_start:
            what = "at" if record.step == "opened" else "after_start"
            yield FieldDifference(f"{field}.{what}", "before the start", "after the start")
        if before is not None and (is_late or record.after_start):
            for change in changes(before, record.rules):
                if change.rule in FIXED_AT_START:
                    yield FieldDifference(f"{field}.rules.{change.rule}", change.after, change.before)
        before = record.rules


def compare_files(folder: Path, form: Format, derived: DerivedResult) -> list[FieldDifference]:
    """Return how the files of a folder differ from those that follow from its record.

    :raises SettingsError: a file cannot be read
    """
    if derived.judged is None or derived.result is None:
        return []
    wrong = []
    if (own := hashlib.sha256(read_regular(folder / CARD)).hexdigest()) != derived.result.card:
        wrong.append(FieldDifference(f"SHA-256 of {CARD}", own, derived.result.card))
    for name, table in derived.judged.basis.tables.items():
        if read_regular(folder / f"{name}.{form}") != derived.files[f"{name}.{form}"]:
            wrong += _row_differences(folder, table, form)
    wrong += text_differences(folder / REPORT, derived.files[REPORT])
    if _decoded(folder / SCHEMA) != msgspec.json.decode(derived.files[SCHEMA]):
        wrong.append(FieldDifference(SCHEMA, "other", "the schema of the card"))
    card = make_card(derived.judged, digest_files(folder, form))
    return [*wrong, *differences(_decoded(folder / CARD), msgspec.json.decode(msgspec.json.encode(card)))]


def _decoded(file: Path) -> Any:
    """Return the JSON value in a file.

    :raises SettingsError: it is not JSON, or it is nested too deeply
    """
    try:
        return decode_json(read_regular(file), object)
    except msgspec.MsgspecError as error:
        raise SettingsError([f"{file} cannot be read: {error}"]) from None


def _row_differences(folder: Path, table: Table, form: Format) -> list[FieldDifference]:
    """Return the rows of a file that the record does not have, and those that it has and the file lacks."""
    rows = Counter(load_table(folder, table.name).rows())
    known = Counter(table.rows())
    wrong = [FieldDifference(f"{table.name}: row", _plain(row), None) for row in rows - known]
    wrong += [FieldDifference(f"{table.name}: row", None, _plain(row)) for row in known - rows]
    return wrong or ([FieldDifference(f"{table.name}.csv", "other order or form", None)] if form == "csv" else [])


def _plain(row: tuple[Any, ...]) -> list[Any]:
    return [iso(cell) if isinstance(cell, datetime) else cell for cell in row]


def text_differences(written: Path, computed: bytes) -> Iterator[FieldDifference]:
    """Yield the first difference of two pages, in which figures may differ in their last digits."""
    if (content := read_regular(written)) == computed:
        return
    try:
        texts = [_NONCE.sub("nonce", page.decode()) for page in (content, computed)]
    except UnicodeDecodeError as error:
        raise SettingsError([f"{written} is not text: {error.reason}"]) from None
    figures = [[match[0] for match in _NUMBER.finditer(text)] for text in texts]
    words = [_NUMBER.split(text) for text in texts]
    if words[0] == words[1] and all(map(_is_same_figure, *figures)):
        return
    place = next(
        (at for at, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), min(map(len, texts))
    )
    yield FieldDifference(written.name, *(text[max(0, place - 30) : place + 30] for text in texts))


def _is_same_figure(written: str, computed: str) -> bool:
    return written == computed or ("." in computed and _is_same(float(written), float(computed)))


def differences(written: Any, computed: Any, field: str = "") -> Iterator[FieldDifference]:
    """Yield the differing fields of two cards, given as plain JSON values."""
    if isinstance(written, Mapping) and isinstance(computed, Mapping):
        for name in sorted({*written, *computed}):
            if (name in written) != (name in computed):
                yield FieldDifference(f"{field}.{name}".lstrip("."), written.get(name), computed.get(name))
            else:
                yield from differences(written[name], computed[name], f"{field}.{name}".lstrip("."))
    elif isinstance(written, list) and isinstance(computed, list) and len(written) == len(computed):
        for number, (first, other) in enumerate(zip(written, computed, strict=True)):
            yield from differences(first, other, f"{field}[{number}]")
    elif not _is_same(written, computed):
        yield FieldDifference(field, written, computed)


def _is_same(written: Any, computed: Any) -> bool:
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (written, computed))
    if are_numbers:
        return math.isclose(written, computed, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return type(written) is type(computed) and bool(written == computed)
