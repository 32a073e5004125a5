"""Orders and accounts of the simulator."""

from trader.api.context import Context
from trader.api.rpc import procedure
from trader.api.schemas.simulator import (
    AccountInput,
    AccountOutput,
    AccountView,
    CancelOrderInput,
    OrderOutput,
    OrderView,
    PlaceOrderInput,
)
from trader.domain.account import Account


@procedure("simulator.placeOrder", changes=True)
async def place_order(context: Context, request: PlaceOrderInput) -> OrderOutput:
    return OrderOutput(order=OrderView.of(await context.exchange.place_order(request.to_order())))


@procedure("simulator.cancelOrder", changes=True)
async def cancel_order(context: Context, request: CancelOrderInput) -> OrderOutput:
    return OrderOutput(order=OrderView.of(await context.exchange.cancel_order(request.account_id, request.order_id)))


@procedure("simulator.getAccount")
async def get_account(context: Context, request: AccountInput) -> AccountOutput:
    return _account_output(context, context.exchange.account(request.account_id))


@procedure("simulator.resetAccount", changes=True)
async def reset_account(context: Context, request: AccountInput) -> AccountOutput:
    return _account_output(context, await context.exchange.reset_account(request.account_id))


def _account_output(context: Context, account: Account) -> AccountOutput:
    exchange = context.exchange
    is_open = account.id in exchange.accounts
    return AccountOutput(account=AccountView.of(account, exchange.marks(), exchange.markets, is_open=is_open))
