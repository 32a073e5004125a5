"""Completed trades as the rows hold them."""

from trader.domain.exchange.orders import Trade
from trader.domain.models import VariantId
from trader.services.exchange.protocol import Exchange
from trader.store.agents import invocations as agents_store
from trader.store.database.pool import Database
from trader.store.exchange import trades as store


class TradingRecords:
    """The record of completed trades. Open positions are in the exchange's memory."""

    def __init__(self, database: Database, exchange: Exchange) -> None:
        self._database = database

    async def trades(
        self, *, account_id: str | None = None, variant: VariantId | None = None, limit: int
    ) -> list[Trade]:
        """The latest completed trades of one account or variant, or of all (None), the newest first.

        Trades of earlier runs are among them.
        """
        async with self._database.connection() as conn:
            if variant is not None:
                chosen = [model.id for model in await agents_store.select_models(conn) if model.variant is variant]
                accounts = [each for each in chosen if account_id in (None, each)]
            elif account_id is not None:
                accounts = [account_id]
            else:
                return await store.select_trades(conn, limit)
            return await store.select_account_trades(conn, accounts, limit)
