"""Positions as the exchange holds them now, and completed trades as the rows hold them."""

from collections.abc import Mapping
from decimal import Decimal

import msgspec

from trader.domain.account import Position, liquidation_price
from trader.domain.records import Model, Trade, VariantId
from trader.errors import MarketUnavailable
from trader.services.exchange import Exchange
from trader.store import agents as agents_store
from trader.store import trades as store
from trader.store.pool import Database


class PositionView(msgspec.Struct, frozen=True, kw_only=True):
    """An open position at the mark of its market. `model` is None for an account that belongs to no model.

    `liquidation_price` is None when no mark would liquidate the account.
    """

    model: Model | None
    account_id: str
    position: Position
    mark: Decimal
    liquidation_price: Decimal | None


class TradingRecords:
    """Positions and completed trades."""

    def __init__(self, database: Database, exchange: Exchange) -> None:
        self._database = database
        self._exchange = exchange

    async def models(self) -> dict[str, Model]:
        """Every model by its id, the oldest first."""
        async with self._database.connection() as conn:
            return {model.id: model for model in await agents_store.select_models(conn)}

    async def positions(self, *, model_id: str | None = None, variant: VariantId | None = None) -> list[PositionView]:
        """The open positions of one account or variant, or of all (None), the oldest first.

        :raises MarketUnavailable: no price of a market with a position has ever been seen
        """
        return self.positions_of(await self.models(), model_id=model_id, variant=variant)

    def positions_of(
        self, models: Mapping[str, Model], *, model_id: str | None = None, variant: VariantId | None = None
    ) -> list[PositionView]:
        """The same, by models that the caller has at hand."""
        marks = self._exchange.marks()
        views = []
        for account in self._exchange.accounts.values():
            model = models.get(account.id)
            if not account.positions or (model_id is not None and account.id != model_id):
                continue
            if variant is not None and (model is None or model.variant is not variant):
                continue
            for symbol, position in account.positions.items():
                if missing := account.positions.keys() - marks.keys():
                    raise MarketUnavailable(f"No price of {', '.join(sorted(missing))} has been seen yet.")
                views.append(
                    PositionView(
                        model=model,
                        account_id=account.id,
                        position=position,
                        mark=marks[symbol],
                        liquidation_price=liquidation_price(account, symbol, marks, self._exchange.markets),
                    )
                )
        return sorted(views, key=lambda view: (view.position.opened_at, view.account_id, view.position.symbol))

    async def trades(
        self, *, account_id: str | None = None, variant: VariantId | None = None, limit: int
    ) -> list[Trade]:
        """The latest completed trades of one account or variant, or of all (None), the newest first."""
        async with self._database.connection() as conn:
            if variant is not None:
                chosen = [model.id for model in await agents_store.select_models(conn) if model.variant is variant]
                accounts = [each for each in chosen if account_id in (None, each)]
            elif account_id is not None:
                accounts = [account_id]
            else:
                return await store.select_trades(conn, limit)
            return await store.select_account_trades(conn, accounts, limit)
