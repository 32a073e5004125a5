"""Texts that models, agents and operators write: on every page of a real browser they are text, wherever they stand."""

from pathlib import Path
from typing import Final

import asyncpg
import pytest
from benchmarks.bulk import language_models, seed_season
from support.calls import Call
from support.chromium import Tab, chromium_program, open_tab
from support.process import serving
from support.waiting import until

from trader.database.pool import Connection, Database

pytestmark = pytest.mark.processes

HOSTILE: Final = """<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>${window.pwned=1}' " & </td>"""

OTHERS: Final = f"""
INSERT INTO halts (cause, reason, halted_by) VALUES ('operator', $${HOSTILE}$$, $${HOSTILE}$$);
INSERT INTO halts (account_id, cause, reason, halted_by)
SELECT min(id), 'operator', $${HOSTILE}$$, $${HOSTILE}$$ FROM models;
UPDATE tool_calls SET metadata = jsonb_build_object(
    'raw', jsonb_build_object('name', $${HOSTILE}$$, 'arguments', $${HOSTILE}$$),
    'decisions', jsonb_build_array(jsonb_build_object('symbol', $${HOSTILE}$$, 'side', $${HOSTILE}$$, 'quantity', 1)),
    'results', jsonb_build_array(jsonb_build_object('rule', $${HOSTILE}$$, 'reason', $${HOSTILE}$$)));
UPDATE models SET logo = 'javascript:window.pwned=1'
"""
"""Texts inside of JSON, an address that runs a script, and rows that a season without faults does not have."""

COLUMNS: Final = """
SELECT c.table_name, c.column_name FROM information_schema.columns c JOIN information_schema.tables t USING (table_name)
WHERE c.table_schema = 'public' AND t.table_type = 'BASE TABLE' AND c.data_type = 'text' AND c.is_generated = 'NEVER'
  AND c.table_name NOT IN ('schema_version', 'service_state', 'webhooks', 'chain_links')
  AND c.column_name !~ '(^|_)id$|^(symbol|provider|configuration|quote_currency|targets)$'
ORDER BY 1, 2
"""
"""Every text column, except identifiers, JSON and the tables that only the service writes."""

PAGES: Final = ("", "conversations", "models", "trades", "evidence", "system", "markets/BTC")


async def make_hostile(conn: Connection) -> set[str]:
    """Write the hostile text into every column that takes it. Return their names."""
    written = set()
    for row in await conn.fetch(COLUMNS):
        table, column = row["table_name"], row["column_name"]
        try:
            async with conn.transaction():
                status = await conn.execute(f"UPDATE {table} SET {column} = $1", HOSTILE)
        except asyncpg.IntegrityConstraintViolationError:
            continue  # so that nobody can write it
        if status != "UPDATE 0":
            written.add(f"{table}.{column}")
    await conn.execute(OTHERS)
    return written


async def does_nothing(tab: Tab) -> None:
    """Open all that the page folds, and check that no text is a script, an image or an address that runs one."""
    await tab.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert await tab.evaluate("typeof window.pwned") == "undefined"
    assert await tab.evaluate("document.querySelectorAll('[onerror], img[src=x], main script').length") == 0
    assert await tab.evaluate("document.querySelectorAll('[href^=javascript], [src^=javascript]').length") == 0
    assert not [problem for problem in tab.problems if "exceptionDetails" in problem], tab.problems


async def test_text_from_users_and_models_is_never_interpreted(
    tmp_path: Path, dsn: str, database: Database, call: Call
) -> None:
    chromium_program()
    await seed_season(dsn, 1, language_models(4), cycle=30, shown=False)
    async with database.connection() as conn:
        written = await make_hostile(conn)
        assert written >= {"models.name", "models.router_model_name", "invocations.response", "orders.invalidation"}, (
            written
        )
        trade = await conn.fetchval("SELECT id::text FROM orders WHERE status = 'CLOSED' LIMIT 1")
        model = await conn.fetchval("SELECT min(id) FROM models")
    assert (await call("report", "season.html", "--name", HOSTILE)).code == 0
    async with serving(tmp_path, DATABASE_URL=dsn) as service:
        async with open_tab(tmp_path / "profile", f"{service.url}/") as tab:
            for path in (*PAGES, f"models/{model}", f"trades/{trade}", f"trades/{HOSTILE}", f"models/{HOSTILE}"):
                await tab.command("Page.navigate", url="about:blank")
                await tab.command("Page.navigate", url=f"{service.url}/#/{path}")
                await until(lambda: tab.evaluate("document.querySelector('.status')?.innerText.startsWith('halted')"))
                if path in ("", "models", "conversations", f"models/{model}"):
                    await until(lambda: tab.evaluate("document.body.innerText.includes('<img src=x onerror=')"), path)
                await does_nothing(tab)
            await tab.command("Page.navigate", url=(tmp_path / "season.html").as_uri())
            await until(lambda: tab.evaluate("document.querySelectorAll('main table').length > 0"), "the report")
            assert await tab.evaluate("document.body.innerText.includes('<img src=x onerror=')")
            await does_nothing(tab)
        assert service.traceback() == ""
