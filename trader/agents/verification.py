"""Verification of the chain: compares its links with each other, with the rows and with anchors."""

import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from trader.agents.domain.entrants import Entrant
from trader.agents.domain.invocation_digest import (
    ChainRecord,
    check_entrant,
    linked_record,
    order_ids,
    placed_under,
    record_digest,
    record_text,
    shown_digest,
)
from trader.agents.payloads import unpacked
from trader.agents.sql.entrants import select_entrants
from trader.agents.sql.invocations import select_invocations_with_ids, select_payloads, select_steps, select_tool_calls
from trader.agents.sql.linked_invocations import (
    select_finished_count,
    select_request_ids,
    select_unlinked,
    select_wrong_counts,
)
from trader.database.pool import Connection, Database
from trader.record.domain.chain import NO_PAYLOAD, Anchor, ChainChecker, ChainLink, PayloadDigests, answers_digest
from trader.record.domain.results import CANDLES, ChainFinding, ResultsChecker, spans_of
from trader.record.sql import chain as store
from trader.record.sql import results as results_store

BATCH: Final = 500
PAGE_BYTES: Final = 1_000_000
"""Maximum characters of records per page, not counting the last record."""

FINDINGS_MAX: Final = 100
"""Maximum number of listed invocations outside the chain."""


class Verification(NamedTuple):
    """The outcome: the extent of the check, and every finding.

    `links` counts the links of invocations, `records` the other links, which cover `rows` rows of results.
    `has_results`: the chain of results has begun. `waiting` accounts have results that no record covers yet.
    """

    links: int
    payloads: int
    anchors: int
    before_chain: int
    findings: Sequence[ChainFinding]
    records: int = 0
    rows: int = 0
    has_results: bool = False
    waiting: int = 0


async def append_interrupted(conn: Connection, invocation_id: UUID) -> None:
    """Append an interrupted invocation to the chain from its rows. The digest of its view is unknown."""
    records = await _read_records(conn, [invocation_id], await select_entrants(conn))
    await store.insert_link(conn, invocation_id, NO_PAYLOAD, record_digest(records[invocation_id], NO_PAYLOAD))


async def read_record(
    database: Database, after: int, limit: int
) -> tuple[list[tuple[ChainLink, str | None]], ChainLink | None]:
    """Return the links after a position, with their record texts, and the last link of the chain.

    At most `limit` links, or fewer when their records exceed `PAGE_BYTES`. A deleted invocation has no record text.
    """
    async with database.reading() as conn:
        return await read_links(conn, after, limit), await store.select_last_link(conn)


async def read_links(conn: Connection, after: int, limit: int) -> list[tuple[ChainLink, str | None]]:
    """Return the links after a position, as `read_record` does."""
    batch = await store.select_links(conn, after, limit)
    ids = [link.invocation_id for link in batch if link.invocation_id is not None]
    invocations = await _read_records(conn, ids, await select_entrants(conn)) if ids else {}
    links, size = [], 0
    for link in batch:
        text = link.record
        if link.invocation_id is not None and (record := invocations.get(link.invocation_id)) is not None:
            text = record_text(record, PayloadDigests(link.view_digest, link.answers_digest)).decode()
        links.append((link, text))
        size += len(text or "")
        if size > PAGE_BYTES:
            break
    return links


async def verify(database: Database, outside: Sequence[Anchor]) -> Verification:
    """Check the whole chain in one snapshot, even while a service writes. `outside` holds anchors kept elsewhere."""
    async with database.reading() as conn:
        anchors = [*await store.select_anchors(conn), *outside]
        entrants = await select_entrants(conn)
        checker, results = ChainChecker(anchors), ResultsChecker(await results_store.select_removed(conn))
        checker.findings += filter(None, map(check_entrant, entrants.values()))
        payloads = links = records = 0
        async for batch in _batches(conn):
            ids = [link.invocation_id for link in batch if link.invocation_id is not None]
            invocations = await _read_records(conn, ids, entrants)
            kept = await select_payloads(conn, [record.invocation for record in invocations.values()])
            for link in batch:
                if link.invocation_id is None:
                    checker.follow(link, None)
                    checker.findings += await _result_findings(conn, link, results)
                    continue
                record = invocations.get(link.invocation_id)
                checker.follow(link, None if record is None else linked_record(link, record))
                if link.invocation_id in kept and link.view_digest is not None:
                    checker.findings += _payload_findings(link, kept[link.invocation_id])
            checker.findings += await _order_findings(conn, batch, invocations)
            links += len(ids)
            records += len(batch) - len(ids)
            payloads += len(kept)
        checker.finish()
        checker.findings += results.finish(await results_store.select_states(conn))
        if results.has_begun:
            checker.findings += map(_count_finding, await select_wrong_counts(conn))
        waiting = await results_store.select_pending_count(conn)
        unlinked = await select_unlinked(conn, FINDINGS_MAX)
        finished = await select_finished_count(conn)
    checker.findings += [
        ChainFinding(
            "inserted",
            None,
            f"invocation {invocation_id} of {model_id} ({finished_at:%Y-%m-%d %H:%M:%S} UTC) is not in the chain",
        )
        for invocation_id, model_id, finished_at in unlinked
    ]
    before_chain = max(0, finished - links - len(unlinked))
    of_results = (records, results.rows, results.has_begun, waiting)
    return Verification(links, payloads, len(anchors), before_chain, checker.findings, *of_results)


async def _result_findings(conn: Connection, link: ChainLink, results: ResultsChecker) -> list[ChainFinding]:
    """Return the contradictions between a record of results and the table rows."""
    try:
        content = msgspec.json.decode(link.record or "", type=dict[str, Any])
        spans = spans_of(content)
        if content["kind"] != link.kind:
            return [
                ChainFinding("changed", link.position, f"the link of the record {content['kind']} says {link.kind}")
            ]
        present = await results_store.select_span_rows(conn, spans) if spans else {}
        if content["kind"] == CANDLES:
            present = await results_store.select_recorded_candles(conn, content["rows"][CANDLES])
        return list(results.follow(link.position, content, present))
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        return [ChainFinding("changed", link.position, f"the record {link.kind} cannot be read: {error!r}")]


def _count_finding(wrong: asyncpg.Record) -> ChainFinding:
    text = (
        f"invocation_counts {wrong['model_id']}, {wrong['run_number']}, {wrong['entrant']}: {wrong['figure']} is "
        f"{wrong['stored']}, and {wrong['counted']} by the invocations"
    )
    return ChainFinding("changed", None, text)


async def _batches(conn: Connection) -> AsyncIterator[list[ChainLink]]:
    after = 0
    while batch := await store.select_links(conn, after, BATCH):
        yield batch
        after = batch[-1].position


async def _read_records(
    conn: Connection, ids: Sequence[UUID], entrants: Mapping[tuple[str, int], Entrant]
) -> dict[UUID, ChainRecord]:
    invocations = await select_invocations_with_ids(conn, ids)
    steps, calls = await select_steps(conn, ids), await select_tool_calls(conn, ids)
    return {
        invocation.id: ChainRecord(
            invocation,
            entrants.get((invocation.model_id, invocation.entrant or 0)),
            steps.get(invocation.id, ()),
            calls.get(invocation.id, ()),
        )
        for invocation in invocations.values()
    }


def _payload_findings(link: ChainLink, content: bytes) -> list[ChainFinding]:
    """Return the differences between a link's digests and the payload, while the payload is retained."""
    where = f"invocation {link.invocation_id}"
    try:
        payload = unpacked(content)
    except (zlib.error, msgspec.MsgspecError):
        return [ChainFinding("changed", link.position, f"the payload of {where} cannot be read")]
    findings = []
    if answers_digest(payload.answers) != link.answers_digest:
        findings.append(ChainFinding("changed", link.position, f"the answers in the payload of {where} do not match"))
    if payload.messages and shown_digest(payload.messages) != link.view_digest:
        findings.append(ChainFinding("changed", link.position, f"the messages in the payload of {where} do not match"))
    return findings


async def _order_findings(
    conn: Connection, batch: Sequence[ChainLink], records: Mapping[UUID, ChainRecord]
) -> list[ChainFinding]:
    """Return the contradictions between the orders in the ledger and the orders of the recorded calls."""
    wanted = {
        invocation_id: [(record.invocation.model_id, name) for name in placed_under(record.calls)]
        for invocation_id, record in records.items()
    }
    present = await select_request_ids(conn, [name for names in wanted.values() for name in names])
    findings = []
    for link in batch:
        if link.invocation_id is None or (record := records.get(link.invocation_id)) is None:
            continue
        names = wanted[link.invocation_id]
        there, recorded = {str(present[name]) for name in names if name in present}, set(order_ids(record.calls))
        for kind, ids in (("inserted", there - recorded), ("removed", recorded - there)):
            text = f"order {', '.join(sorted(ids))} of invocation {link.invocation_id} was {kind}"
            findings += (
                [ChainFinding("inserted" if kind == "inserted" else "removed", link.position, text)] if ids else []
            )
    return findings
