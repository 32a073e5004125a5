"""GET /api/record: the chain for external verification, and the documented verifier on a real record."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest_aiohttp.plugin import AiohttpClient
from support.served import AppClient, make_app
from support.trading_floor import Floor, calling, hold, opening

from trader.api import record
from trader.api.context import DATABASE
from trader.record.results import record_results
from trader.record.sql.chain import insert_anchor, select_anchors

VERIFIER = Path(__file__).parents[3] / "docs" / "examples" / "verify_record.py"


@pytest.fixture
async def client(floor: Floor, aiohttp_client: AiohttpClient) -> AppClient:
    """A service with a record: an entrant, two decisions, a fill and a run."""
    await floor.add("ada")
    floor.provider.scripts["ada"] = [calling(opening()), hold("größer als € 5")]
    for _ in range(2):
        await floor.cycle()
    assert floor.exchange.term is not None
    await record_results(floor.database, floor.exchange.term, floor.clock.now())
    app = make_app(record.routes(), database=floor.database)
    app[DATABASE] = floor.database
    return await aiohttp_client(app)


async def _page(client: AppClient, after: object, status: int = 200) -> Any:
    async with client.get(f"/api/record?after={after}") as response:
        assert response.status == status
        return await response.json()


async def _verify(client: AppClient, anchors: Path) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", VERIFIER, str(client.make_url("/")), anchors, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode()


async def test_pages_continue_to_the_head(client: AppClient, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await _page(client, 0)
    assert [link["kind"] for link in whole["links"]] == [
        "models", "entrants", "entrants", "invocation", "invocation", "begin", "results",
    ]  # fmt: skip
    last = whole["links"][-1]
    assert (whole["head"], whole["next"]) == ({"position": 7, "digest": last["digest"]}, None)
    assert [fill["quantity"] for fill in json.loads(last["record"])["rows"]["fills"]] == ["0.1", "0.1"]
    monkeypatch.setattr(record, "LINKS_MAX", 4)
    first, rest = await _page(client, 0), await _page(client, 4)
    assert (first["next"], rest["next"]) == (4, None)
    assert first["links"] + rest["links"] == whole["links"]
    assert (await _page(client, 9_999_999_999_999_999))["links"] == []


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "9" * 17, "", "%D9%A1"])
async def test_an_invalid_position_is_refused(client: AppClient, after: str) -> None:
    assert "is not a position of the chain" in (await _page(client, after, 400))["error"]


async def test_the_documented_verifier_detects_tampering(
    client: AppClient, floor: Floor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "LINKS_MAX", 4)
    async with floor.database.connection() as conn:
        await insert_anchor(conn, 0)
        (anchor,) = await select_anchors(conn)
    anchors = tmp_path / "anchors.jsonl"
    line = {"position": anchor.position, "digest": anchor.digest.hex(), "anchoredAt": "2026-01-01T00:00:00.000Z"}
    anchors.write_text(json.dumps(line) + "\n")
    code, said = await _verify(client, anchors)
    assert (code, said.splitlines()[-1]) == (0, "intact"), said
    assert said.startswith(
        f"7 links, the head is {anchor.digest.hex()}: {{'models': 1, 'entrants': 2, 'invocation': 2,"
    )
    for statement, found in (
        ("UPDATE invocations SET response = 'x' WHERE status = 'completed'", "position 4: the record was changed"),
        ("UPDATE chain_links SET record = replace(record, '0.1', '2') WHERE kind = 'results'", "7: the record"),
        ("UPDATE chain_links SET digest = sha256('x') WHERE position = 2", "position 2: the link does not follow"),
        ("DELETE FROM chain_links WHERE position = 7", "position 7: the chain is cut off before this anchor"),
        ("DELETE FROM chain_links WHERE position = 4", "position 4: the link is gone"),
    ):  # fmt: skip
        async with floor.database.connection() as conn:
            await conn.execute(statement)
        code, said = await _verify(client, anchors)
        assert code == 1
        assert found in said, statement
