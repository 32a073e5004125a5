"""The seed of a simulated market: drawn for a new database, kept there, secret until it is published."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from support.kills import write_candles
from support.records import make_model

from trader.agents.domain.models import ModelConfiguration, ProviderDefinition
from trader.agents.sql.models import upsert_model
from trader.composition.external import require_provider_or_model, settle_seed
from trader.core.clock import epoch_second
from trader.core.errors import SettingsError, StartError
from trader.database.embedded.server import database_name
from trader.database.pool import Database
from trader.exchange.sql.accounts import DatabaseIdentity, upsert_service_state
from trader.market.sources.replay import ReplaySource
from trader.market.sources.source import Seed
from trader.market.sources.synthetic import SyntheticSource
from trader.settings.settings import Settings

SYMBOLS = ("BTC", "ETH")
BEGIN = datetime(2025, 1, 1, tzinfo=UTC)


async def seeded(database: Database, seed: int | None = None, *, is_written: bool = True) -> SyntheticSource:
    source = SyntheticSource(seed, SYMBOLS)
    await settle_seed(source, database, is_written=is_written)
    return source


def seed_of(source: SyntheticSource | ReplaySource) -> Seed:
    assert source.seed is not None
    return source.seed


async def use(database: Database, identity: str) -> None:
    async with database.transaction() as conn:
        await upsert_service_state(conn, DatabaseIdentity(identity, "simulated"))


async def test_a_service_needs_a_key_an_address_or_a_model_of_a_provider_without_a_key(database: Database) -> None:
    settings = Settings.load({}, None, demo=False)
    with pytest.raises(SettingsError, match="At least one AI provider is needed: set one of OPENROUTER_API_KEY"):
        await require_provider_or_model(settings, database)
    await require_provider_or_model(Settings.load({}, None, demo=True), database)
    await require_provider_or_model(
        Settings.load({"OPENAI_BASE_URL": "http://localhost:1/v1"}, None, demo=False), database
    )
    ollama = ProviderDefinition(name="ollama", base_url="http://localhost:11434/v1")
    keyed = msgspec.structs.replace(ollama, key_variable="LAB_API_KEY")
    for definition in (keyed, ollama):
        with pytest.raises(SettingsError):
            await require_provider_or_model(settings, database)
        configuration = ModelConfiguration(provider_definition=definition)
        model = msgspec.structs.replace(make_model("ada"), provider="ollama", configuration=configuration)
        async with database.connection() as conn:
            await upsert_model(conn, model)
    await require_provider_or_model(settings, database)


async def test_processes_that_start_at_once_on_a_new_database_share_one_secret_seed(database: Database) -> None:
    sources = await asyncio.gather(*(seeded(database) for _ in range(4)))
    (seed,) = {seed_of(source) for source in sources}
    assert seed.is_secret
    assert seed.value >= 2**64, "guessing it is out of reach"
    await use(database, sources[0].identity)
    later, reader = await seeded(database), await seeded(database, is_written=False)
    assert seed_of(later) == seed_of(reader) == seed
    assert later.identity == reader.identity == sources[0].identity


async def test_each_database_has_its_own_seed(database: Database) -> None:
    first = seed_of(await seeded(database))
    async with database.connection() as conn:
        await conn.execute("DELETE FROM market_seed")
    assert seed_of(await seeded(database)) != first


async def test_the_identity_shows_the_digest_and_not_the_seed(database: Database) -> None:
    source = await seeded(database)
    seed = seed_of(source)
    assert source.identity == f"synthetic:sha256:{seed.digest}"
    assert str(seed.value) not in repr(DatabaseIdentity(source.identity, "simulated"))


async def test_a_published_seed_has_the_digest_and_draws_the_same_prices(database: Database) -> None:
    secret = await seeded(database)
    published = SyntheticSource(seed_of(secret).value, SYMBOLS)
    assert seed_of(published).digest == secret.identity.rpartition(":")[2]
    second = epoch_second(BEGIN)
    assert [quote.mark for quote in published.tick(second).quotes.values()] == [
        quote.mark for quote in secret.tick(second).quotes.values()
    ]
    assert (await seeded(database, seed_of(secret).value)).identity == secret.identity, "its own database goes on"


async def test_a_given_seed_is_known_and_not_kept(database: Database) -> None:
    source = await seeded(database, 7)
    assert (source.identity, seed_of(source)) == ("synthetic:7", Seed(7))
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM market_seed") == 0


async def test_a_database_of_a_known_seed_goes_on_with_it(database: Database) -> None:
    await use(database, "synthetic:7")
    source = await seeded(database)
    assert (source.identity, seed_of(source)) == ("synthetic:7", Seed(7))


async def test_a_given_seed_that_a_database_began_with_wins_over_one_that_was_drawn_before(database: Database) -> None:
    await seeded(database)  # a start that ended before it led
    await use(database, (await seeded(database, 7)).identity)
    assert seed_of(await seeded(database)) == Seed(7)


async def test_a_database_of_another_market_gets_no_seed(database: Database) -> None:
    await use(database, "venue")
    assert (await seeded(database)).identity != "venue"
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM market_seed") == 0


async def test_a_reader_of_a_new_database_is_refused(database: Database) -> None:
    with pytest.raises(StartError, match="no seed yet"):
        await seeded(database, is_written=False)


async def test_a_replay_draws_its_paths_from_the_seed_of_the_database(database: Database, tmp_path: Path) -> None:
    await write_candles(tmp_path / "candles", 7, BEGIN, hours=1)
    drawn = []
    for seed in (None, None, 0):
        source = ReplaySource(tmp_path / "candles", SYMBOLS, seed=seed)
        await source.open()
        await settle_seed(source, database, is_written=True)
        ticks = [tick async for tick in source.history(BEGIN, BEGIN + timedelta(minutes=5))]
        drawn.append((source.identity, [quote.mark for tick in ticks for quote in tick.quotes.values()]))
    first, again, known = drawn
    assert first == again
    assert first[0].startswith("replay:")
    assert first[0].count("sha256:") == 1
    assert known[1] != first[1]


def test_a_database_name_has_no_secret_and_fits_into_postgresql() -> None:
    secret = Seed(2**127, is_secret=True)
    assert database_name(f"synthetic:{secret.name}") == "trader_synthetic"
    published = database_name(f"replay:2025-01-01T00:00:00.000Z:{2**127}")
    assert len(published) <= 63
    assert published != database_name("replay:2025-01-01T00:00:00.000Z")
