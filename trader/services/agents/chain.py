"""Verification of the chain: its links against each other, against the rows, and against anchors."""

import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from trader.domain.agents.chain import (
    NO_PAYLOAD,
    Anchor,
    ChainChecker,
    ChainLink,
    ChainRecord,
    PayloadDigests,
    answers_digest,
    check_entrant,
    order_ids,
    placed_under,
    record_digest,
    record_text,
    shown_digest,
)
from trader.domain.agents.entrants import Entrant
from trader.domain.agents.results import ChainFinding, ResultsChecker, spans_of
from trader.services.agents.payloads import unpacked
from trader.store.agents import chain as store
from trader.store.agents.invocations import select_payloads, select_steps, select_tool_calls
from trader.store.database.pool import Connection, Database
from trader.store.portfolio import results as results_store

BATCH: Final = 500
PAGE_BYTES: Final = 1_000_000
"""Characters of records in one page, but for the last of them."""

FINDINGS_MAX: Final = 100
"""Invocations outside the chain that are listed."""


class Verification(NamedTuple):
    """The outcome: how much was checked, and every finding.

    `links` are those of invocations, `records` the others, with `rows` of results. `has_results`: the chain of results
    has begun, after the first results of `accounts_before`. `waiting` accounts have results that are in no record yet.
    """

    links: int
    payloads: int
    anchors: int
    before_chain: int
    findings: Sequence[ChainFinding]
    records: int = 0
    rows: int = 0
    has_results: bool = False
    accounts_before: int = 0
    waiting: int = 0


async def append_interrupted(conn: Connection, invocation_id: UUID) -> None:
    """Append an interrupted invocation to the chain from its rows. The digest of its view is not known."""
    records = await _read_records(conn, [invocation_id], await store.select_entrants(conn))
    await store.insert_link(conn, invocation_id, NO_PAYLOAD, record_digest(records[invocation_id], NO_PAYLOAD))


async def read_record(
    database: Database, after: int, limit: int
) -> tuple[list[tuple[ChainLink, str | None]], ChainLink | None]:
    """Return the links after a position with the text of their records, and the last link of the chain.

    At most `limit` links, fewer when their records have over `PAGE_BYTES`; of an invocation that is gone there is none.
    """
    async with database.reading() as conn:
        head = await store.select_last_link(conn)
        batch = await store.select_links(conn, after, limit)
        ids = [link.invocation_id for link in batch if link.invocation_id is not None]
        invocations = await _read_records(conn, ids, await store.select_entrants(conn)) if ids else {}
    links, size = [], 0
    for link in batch:
        text = link.record
        if link.invocation_id is not None and (record := invocations.get(link.invocation_id)) is not None:
            text = record_text(record, PayloadDigests(link.view_digest, link.answers_digest)).decode()
        links.append((link, text))
        size += len(text or "")
        if size > PAGE_BYTES:
            break
    return links, head


async def verify(database: Database, outside: Sequence[Anchor]) -> Verification:
    """Check the whole chain as of one moment, even while a service writes. `outside` are anchors kept elsewhere."""
    async with database.reading() as conn:
        anchors = [*await store.select_anchors(conn), *outside]
        entrants = await store.select_entrants(conn)
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
                checker.follow(link, invocations.get(link.invocation_id))
                if link.invocation_id in kept and link.view_digest is not None:
                    checker.findings += _payload_findings(link, kept[link.invocation_id])
            checker.findings += await _order_findings(conn, batch, invocations)
            links += len(ids)
            records += len(batch) - len(ids)
            payloads += len(kept)
        checker.finish()
        checker.findings += results.finish(await results_store.select_states(conn))
        if results.has_begun:
            checker.findings += [_count_finding(count) for count in await store.select_wrong_counts(conn)]
        waiting = await results_store.select_pending_count(conn)
        unlinked = await store.select_unlinked(conn, FINDINGS_MAX)
        finished = await store.select_finished_count(conn)
    checker.findings += [
        ChainFinding(
            "inserted",
            None,
            f"invocation {invocation.id} of {invocation.model_id} "
            f"({invocation.finished_at:%Y-%m-%d %H:%M:%S} UTC) is not in the chain",
        )
        for invocation in unlinked
    ]
    before_chain = max(0, finished - links - len(unlinked))
    of_results = (records, results.rows, results.has_begun, results.accounts_before, waiting)
    return Verification(links, payloads, len(anchors), before_chain, checker.findings, *of_results)


async def _result_findings(conn: Connection, link: ChainLink, results: ResultsChecker) -> list[ChainFinding]:
    """Return the contradictions between a record of results and the rows of the tables."""
    try:
        content = msgspec.json.decode(link.record or "", type=dict[str, Any])
        spans = spans_of(content)
        if content["kind"] != link.kind:
            return [
                ChainFinding("changed", link.position, f"the link of the record {content['kind']} says {link.kind}")
            ]
        present = await results_store.select_span_rows(conn, spans) if spans else {}
        return list(results.follow(link.position, content, present))
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        return [ChainFinding("changed", link.position, f"the record {link.kind} cannot be read: {error!r}")]


def _count_finding(count: store.WrongCount) -> ChainFinding:
    text = (
        f"invocation_counts {count.model_id}, {count.run_number}, {count.entrant}: {count.figure} is {count.stored}, "
        f"and {count.counted} by the invocations"
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
    invocations = await store.select_linked_invocations(conn, ids)
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
    """Return what differs between the digests of a link and the payload, while that is kept."""
    where = f"invocation {link.invocation_id}"
    try:
        payload = unpacked(content)
    except (zlib.error, msgspec.MsgspecError):
        return [ChainFinding("changed", link.position, f"the payload of {where} cannot be read")]
    findings = []
    if answers_digest(payload.answers) != link.answers_digest:
        findings.append(ChainFinding("changed", link.position, f"the answers in the payload of {where} are others"))
    if payload.messages and shown_digest(payload.messages) != link.view_digest:
        findings.append(ChainFinding("changed", link.position, f"the messages in the payload of {where} are others"))
    return findings


async def _order_findings(
    conn: Connection, batch: Sequence[ChainLink], records: Mapping[UUID, ChainRecord]
) -> list[ChainFinding]:
    """Return the contradictions between the orders in the ledger and those that the recorded calls placed."""
    wanted = {
        invocation_id: [(record.invocation.model_id, name) for name in placed_under(record.calls)]
        for invocation_id, record in records.items()
    }
    present = await store.select_request_ids(conn, [name for names in wanted.values() for name in names])
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
