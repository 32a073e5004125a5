"""The chain: every manipulation of the record of finished invocations is found, with its position."""

from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import pytest
from support.scripted import START
from support.trading_floor import Floor, ScriptedProvider, calling, hang, hold, open_floor, opening
from support.waiting import until

from trader.agents.domain.invocation_digest import ChainRecord, record_digest
from trader.agents.sql.entrants import select_entrants
from trader.agents.sql.invocations import select_invocations_with_ids, select_steps, select_tool_calls
from trader.agents.verification import verify
from trader.core.errors import ProviderError
from trader.database.pool import Connection, Database
from trader.record.domain.chain import Anchor, PayloadDigests, link_digest
from trader.record.sql import chain as store

INVOCATIONS = 8
RECORDS = 6
"""Two models are added, their entrants begin, and each has a first answer: from position 9 on, all are invocations."""

LINKS = INVOCATIONS + RECORDS

NOBODY = UUID(int=0)


@pytest.fixture
async def chain(database: Database) -> AsyncIterator[Database]:
    """A database with eight linked invocations: an order, failures, an interruption, and quiet ones."""
    async with open_floor(database) as floor:
        await floor.add("ada", "bob")
        floor.provider.scripts["ada"] = [calling(opening()), hold("in")]
        floor.provider.scripts["bob"] = [calling(opening(quantity=10_000)), hold("too much")]
        await floor.cycle()
        floor.provider.scripts = {"ada": [hold()], "bob": [ProviderError("no answer")]}
        for _ in range(3):
            await floor.cycle()
        yield database


async def _anchors(database: Database) -> list[Anchor]:
    """The heads of the chain that an outsider recorded: after links 9 and 12, and the last."""
    async with database.connection() as conn:
        links = await store.select_links(conn, 0, 100)
    return [Anchor(link.position, link.digest, START, "outside") for link in links if link.position in (9, 12, LINKS)]


async def _found(database: Database, outside: list[Anchor] | None = None) -> list[tuple[str, int | None]]:
    return [(finding.kind, finding.position) for finding in (await verify(database, outside or [])).findings]


async def _id_at(conn: Connection, position: int) -> UUID:
    invocation_id: UUID = await conn.fetchval("SELECT invocation_id FROM chain_links WHERE position = $1", position)
    return invocation_id


async def _delete_invocation(conn: Connection, position: int) -> None:
    invocation_id = await _id_at(conn, position)
    await conn.execute("UPDATE orders SET invocation_id = NULL WHERE invocation_id = $1", invocation_id)
    await conn.execute("DELETE FROM chain_links WHERE invocation_id = $1", invocation_id)
    for table in ("invocation_steps", "tool_calls"):
        await conn.execute(f"DELETE FROM {table} WHERE invocation_id = $1", invocation_id)
    await conn.execute("DELETE FROM invocations WHERE id = $1", invocation_id)


async def _rebuild(conn: Connection, first: int) -> None:
    """Recompute every digest from a position on, as anyone with write access to the database could."""
    links = await store.select_links(conn, 0, 100)
    entrants = await select_entrants(conn)
    before = links[first - 2].digest if first > 1 else bytes(32)
    for link in links[first - 1 :]:
        assert link.invocation_id is not None
        ids = [link.invocation_id]
        done = (await select_invocations_with_ids(conn, ids))[link.invocation_id]
        steps, calls = await select_steps(conn, ids), await select_tool_calls(conn, ids)
        entrant = entrants[done.model_id, done.entrant or 0]
        record = ChainRecord(done, entrant, steps.get(done.id, ()), calls.get(done.id, ()))
        digest = record_digest(record, PayloadDigests(link.view_digest, link.answers_digest))
        before = link_digest(before, digest)
        await conn.execute(
            "UPDATE chain_links SET record_digest = $2, digest = $3 WHERE position = $1", link.position, digest, before
        )


async def test_every_finished_invocation_is_in_the_chain_once(chain: Database) -> None:
    report = await verify(chain, await _anchors(chain))
    assert (report.links, report.anchors, report.before_chain, list(report.findings)) == (INVOCATIONS, 3, 0, [])
    assert (report.payloads, report.records) == (INVOCATIONS, RECORDS)


async def test_an_interrupted_invocation_is_linked_at_the_next_start(database: Database) -> None:
    async with open_floor(database) as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening()), hang]
        await floor.start_batch()
        await until(lambda: floor.exchange.account("ada").positions)
        await floor.agents.start()  # as the process that follows this one's sudden end
        report = await verify(database, [])
        assert (report.links, list(report.findings)) == (1, [])
        await floor.agents.close()
        report = await verify(database, [])
        assert (report.links, list(report.findings)) == (1, []), "nothing is added to a closed invocation"


@pytest.mark.slow
async def test_concurrent_ends_make_one_chain(floor: Floor) -> None:
    names = [f"model-{number}" for number in range(20)]
    await floor.add(*names)
    await floor.cycle()
    report = await verify(floor.database, [])
    assert (report.links, list(report.findings)) == (len(names), [])


EDITS: dict[str, str] = {
    "an answer": "UPDATE invocations SET response = 'I knew it' WHERE id = $1",
    "a time": "UPDATE invocations SET started_at = started_at - interval '1 second' WHERE id = $1",
    "an entrant": "UPDATE invocations SET entrant = NULL WHERE id = $1",
    "a step": "UPDATE invocation_steps SET model = 'other' WHERE invocation_id = $1 AND number = 1",
    "a call": "UPDATE tool_calls SET metadata = jsonb_set(metadata, '{decisions,0,reason}', '\"x\"') "
    "WHERE invocation_id = $1",
    "one call less": "DELETE FROM tool_calls WHERE invocation_id = $1",
    "the digest of the view": "UPDATE chain_links SET view_digest = sha256('x') WHERE invocation_id = $1",
}


@pytest.mark.parametrize("statement", EDITS.values(), ids=EDITS)
async def test_an_edit_is_found_where_it_was_made(chain: Database, statement: str) -> None:
    async with chain.connection() as conn:
        links = await store.select_links(conn, 0, 100)
        done = await select_invocations_with_ids(conn, [link.invocation_id for link in links if link.invocation_id])
        place = next(n for n in range(9, LINKS) if done[links[n - 1].invocation_id or NOBODY].status == "completed")
        await conn.execute(statement, links[place - 1].invocation_id)
    assert set(await _found(chain)) == {("changed", place)}


async def test_an_edited_configuration_is_found(chain: Database) -> None:
    async with chain.connection() as conn:
        await conn.execute("UPDATE entrants SET configuration = configuration || ' ' WHERE model_id = 'ada'")
    assert {kind for kind, _ in await _found(chain)} == {"changed"}
    async with chain.connection() as conn:
        await conn.execute(
            "UPDATE entrants SET configuration = rtrim(configuration), fingerprint = repeat('0', 64) "
            "WHERE model_id = 'ada'"
        )
    texts = [finding.text for finding in (await verify(chain, [])).findings]
    assert len(texts) == 2
    assert "does not match its fingerprint" in texts[0]
    assert "entrants ada, 1: fingerprint is 0000" in texts[1]
    async with chain.connection() as conn:
        await conn.execute("UPDATE entrants SET configuration = '[]' WHERE model_id = 'ada'")
    assert "does not match its fingerprint" in (await verify(chain, [])).findings[0].text


async def test_an_edited_payload_is_found(chain: Database) -> None:
    async with chain.connection() as conn:
        ids = [await _id_at(conn, 9), await _id_at(conn, 8)]
        await conn.execute(
            "UPDATE invocation_payloads a SET payload = b.payload "
            "FROM invocation_payloads b WHERE a.invocation_id = $1 AND b.invocation_id = $2",
            *ids,
        )
    assert set(await _found(chain)) == {("changed", 9)}


async def test_retention_is_not_a_finding(chain: Database) -> None:
    async with chain.connection() as conn:
        await conn.execute("DELETE FROM invocation_payloads")
    report = await verify(chain, [])
    assert (report.links, report.payloads, list(report.findings)) == (INVOCATIONS, 0, [])


async def test_an_inserted_invocation_is_found(chain: Database) -> None:
    async with chain.connection() as conn:
        await conn.execute(
            "INSERT INTO invocations (id, model_id, status, started_at, finished_at, entrant) "
            "SELECT $1, model_id, 'completed', started_at, finished_at, entrant FROM invocations WHERE id = $2",
            uuid4(),
            await _id_at(conn, 11),
        )
    assert await _found(chain) == [("inserted", None)]


async def test_a_removed_invocation_is_found_where_it_was(chain: Database) -> None:
    async with chain.connection() as conn:
        await _delete_invocation(conn, 10)
    assert await _found(chain) == [("removed", 10)]


async def test_a_removed_and_closed_up_link_is_found_where_it_was(chain: Database) -> None:
    async with chain.connection() as conn:
        await _delete_invocation(conn, 10)
        for position in range(11, LINKS + 1):
            await conn.execute("UPDATE chain_links SET position = position - 1 WHERE position = $1", position)
    assert await _found(chain) == [("changed", 10)]
    assert set(await _found(chain, await _anchors_of_full_chain(chain))) == {("changed", 10), ("cut off", LINKS)}


async def _anchors_of_full_chain(database: Database) -> list[Anchor]:
    async with database.connection() as conn:
        last = (await store.select_links(conn, 0, 100))[-1]
    return [Anchor(LINKS, last.digest, START, "outside")]


async def test_swapped_links_are_found_at_the_first_one(chain: Database) -> None:
    async with chain.connection() as conn:
        for old, new in ((10, 99), (11, 10), (99, 11)):
            await conn.execute("UPDATE chain_links SET position = $2 WHERE position = $1", old, new)
    assert await _found(chain) == [("changed", 10), ("changed", 11), ("changed", 12)]


async def test_a_rebuilt_chain_is_found_only_by_anchors(chain: Database) -> None:
    anchors = await _anchors(chain)
    async with chain.connection() as conn:
        await conn.execute("UPDATE invocations SET response = 'I knew it' WHERE id = $1", await _id_at(conn, 11))
        await _rebuild(conn, 11)
    assert await _found(chain) == [], "without anchors it looks genuine"
    assert await _found(chain, anchors) == [("rebuilt", 10)], "somewhere from 10 to 12, between two anchors"


async def test_the_anchors_of_the_database_are_compared_too(chain: Database) -> None:
    async with chain.connection() as conn:
        await store.insert_anchor(conn, 3600)
        await store.insert_anchor(conn, 3600)
        assert [anchor.position for anchor in await store.select_anchors(conn)] == [LINKS]
        await conn.execute("UPDATE invocations SET response = 'I knew it' WHERE id = $1", await _id_at(conn, 10))
        await _rebuild(conn, 10)
    assert await _found(chain) == [("rebuilt", 1)]


async def test_a_truncated_chain_is_found(chain: Database) -> None:
    anchors = await _anchors(chain)
    async with chain.connection() as conn:
        last = await _id_at(conn, LINKS)
        await conn.execute("DELETE FROM chain_links WHERE position = $1", LINKS)
    assert await _found(chain) == [("inserted", None)], "an invocation that no link covers"
    async with chain.connection() as conn:
        for table, key in (
            ("invocation_steps", "invocation_id"),
            ("tool_calls", "invocation_id"),
            ("invocations", "id"),
        ):
            await conn.execute(f"DELETE FROM {table} WHERE {key} = $1", last)
    assert await _found(chain) == [], "nothing in the database remembers it"
    assert await _found(chain, anchors) == [("cut off", LINKS)]


async def test_an_order_that_no_call_placed_is_found(chain: Database) -> None:
    async with chain.connection() as conn:
        await conn.execute(
            "UPDATE order_requests SET client_order_id = (SELECT max(id::text) FROM invocations WHERE model_id = 'ada' "
            "AND id <> split_part(client_order_id, ':', 1)::uuid) || ':1' WHERE account_id = 'ada'"
        )
    assert {kind for kind, _ in await _found(chain)} == {"removed", "inserted"}


async def test_orders_with_and_without_an_id_of_a_strategy_are_those_of_its_calls(database: Database) -> None:
    provider = ScriptedProvider("strategy")
    order = {"symbol": "BTC", "side": "buy", "quantity": 0.01, "leverage": 2, "exitPlan": {"stop": 90_000}}
    provider.scripts["own"] = [
        calling(*(("placeOrder", order | {"clientOrderId": chosen}) for chosen in (None, "mine", "mine"))), hold("in")
    ]  # fmt: skip
    async with open_floor(database, also=[provider]) as floor:
        await floor.add("own", provider="strategy")
        await floor.cycle()
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 2
    assert await _found(database) == []
