"""Procedures of `simulator`: orders, accounts and completed trades of the paper exchange."""

from operator import attrgetter

import msgspec

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.response_cache import trades_token
from trader.api.schemas.common import or_none
from trader.api.schemas.paging import cut_page, page_of
from trader.api.schemas.simulator import (
    AccountInput,
    AccountOutput,
    AccountView,
    CancelOrderInput,
    OrderOutput,
    OrderView,
    PlaceOrderInput,
)
from trader.api.schemas.trades import (
    CompletedStats,
    CompletedTrade,
    GetCompletedTradesInput,
    GetCompletedTradesOutput,
)
from trader.api.turns import in_slices
from trader.core.errors import ForeignAccount, ManualOrdersOff


@procedure("simulator.placeOrder", changes=True, paper_only=True)
async def place_order(context: Context, request: PlaceOrderInput) -> OrderOutput:
    """Place an order on a simulated account; one that does not exist is opened.

    An order that the exchange refuses (no margin, below the minimum, nothing to reduce) returns the status `rejected`
    and a reason. The same `clientOrderId` on the same account returns the first response again and trades once. A limit
    order needs `limitPrice`; a market order takes none. An order on a model's account is marked `manual`, and the model
    is off the board until its account is reset.

    :raises Conflict: the `clientOrderId` was already used on this account for a different order.
    :raises ManualOrdersOff: the account belongs to a model, and MANUAL_ORDERS=off.
    :raises ForeignAccount: the account belongs to an external agent, and only its key may trade it.
    """
    await _require_not_external(context, request.account_id)
    order = request.to_order()
    if request.account_id in context.models.by_id:
        if context.settings.manual_orders == "off":
            raise ManualOrdersOff(f"{request.account_id} is a model, and MANUAL_ORDERS=off refuses manual orders")
        order = msgspec.structs.replace(order, manual=True)
    (answer,) = await context.exchange.place_orders(order)
    return OrderOutput(order=OrderView.from_attributes(answer))


@procedure("simulator.cancelOrder", changes=True, paper_only=True)
async def cancel_order(context: Context, request: CancelOrderInput) -> OrderOutput:
    """Cancel a resting order.

    :raises NotFound: the account has no such order.
    :raises ForeignAccount: the account belongs to an external agent, and only its key may trade it.
    """
    await _require_not_external(context, request.account_id)
    return OrderOutput(
        order=OrderView.from_attributes(await context.exchange.cancel_order(request.account_id, request.order_id))
    )


@procedure("simulator.getAccount", paper_only=True)
async def get_account(context: Context, request: AccountInput) -> AccountOutput:
    """Return a simulated account; with `exists` false, the new account that an order would open, without storing it."""
    return account_output(context, request.account_id)


@procedure("simulator.resetAccount", changes=True, operates=True, paper_only=True)
async def reset_account(context: Context, request: AccountInput) -> AccountOutput:
    """Close the account's run at market prices and start a new one with the starting capital.

    An account that does not exist is not opened: `exists` is false.

    :raises ForeignAccount: the account belongs to an external agent, and only its key may trade it.
    """
    await _require_not_external(context, request.account_id)
    await context.exchange.reset_account(request.account_id)
    return account_output(context, request.account_id)


@procedure("simulator.getCompletedTradesFromDB", paper_only=True, long=True, token=trades_token)
async def get_completed_trades(context: Context, request: GetCompletedTradesInput) -> GetCompletedTradesOutput:
    """List completed trades of simulated accounts, newest first, and figures over the listed ones."""
    page = page_of(request.limit, request)
    rows = await context.portfolio.trades(account_id=or_none(request.model_id), page=page)
    cut = cut_page(rows, page, attrgetter("closed_at"))
    completed = await in_slices(CompletedTrade.of, cut.rows)
    stats = CompletedStats.of(cut.rows)
    return GetCompletedTradesOutput(trades=completed, stats=stats, next_before=cut.next_before, next_skip=cut.next_skip)


def account_output(context: Context, account_id: str) -> AccountOutput:
    """Return an account with its current figures, or the new account that an order would open."""
    exchange = context.exchange
    account = exchange.account(account_id)
    is_open = account.id in exchange.accounts
    return AccountOutput(account=AccountView.of(account, exchange.marks(), exchange.markets, is_open=is_open))


async def _require_not_external(context: Context, account_id: str) -> None:
    """Check that the account does not belong to an external agent, because only its key may trade it.

    :raises ForeignAccount: it does
    """
    if account_id not in context.exchange.accounts:  # a command may have added an agent of this name just now
        await context.models.reload()
    model = context.models.by_id.get(account_id)
    if model is not None and model.is_external:
        raise ForeignAccount(f"the account {account_id} belongs to an external agent: only its key trades, by agent.*")
